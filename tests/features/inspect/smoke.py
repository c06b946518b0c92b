"""inspect, for scripts/smoke.py."""

from __future__ import annotations

import json
from typing import Any


def run(smoke: Any) -> None:
    for path in ("model.pt", "model.safetensors"):
        smoke.run("inspect", path)
        json.loads(smoke.run("inspect", "--json", path))
    smoke.run("inspect", "model.pt", "--html", "page.html", "--depth", "1", "--as", "bf16", "--max-shard-size", "1GB")
    if "Usage" not in smoke.run("inspect", "--help"):
        raise SystemExit("The help of inspect says nothing of its usage.")
