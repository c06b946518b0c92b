"""safetensors2dcp, for scripts/smoke.py: neither torch nor numpy need be there."""

from __future__ import annotations

from typing import Any


def run(smoke: Any) -> None:
    if "Usage" not in smoke.run("safetensors2dcp", "--help"):
        raise SystemExit("The help of safetensors2dcp says nothing of its usage.")
