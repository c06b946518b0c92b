"""convert --output-dir, for scripts/smoke.py."""

from __future__ import annotations

import json
from typing import Any


def run(smoke: Any) -> None:
    (smoke.place / "broken.pt").write_bytes(b"no checkpoint")
    many = ["convert", "model.pt", "broken.pt", "first.safetensors", "--output-dir", "any", "--output-name", "{number}"]
    report = json.loads(smoke.run(*many, "--jobs", "2", "--json", code=4))
    if (report["converted"], report["failed"]) != (2, 1):
        raise SystemExit(f"Of three inputs, one of them broken: {report}.")
