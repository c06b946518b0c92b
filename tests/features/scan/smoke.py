"""scan, for scripts/smoke.py: neither torch nor numpy need be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
# Steps of trainings, of formats that are here.
_STEPS = "features/*/data/z3_bf16_w2/checkpoint", "features/*/data/fsdp2_w2_nested/checkpoint"
STEPS = [path for pattern in _STEPS for path in TESTS.glob(pattern)]


def run(smoke: Any) -> None:
    smoke.run("scan", "--sarif", "scan.sarif", "model.pt", "model.safetensors", *STEPS)
    if "Usage" not in smoke.run("scan", "--help"):
        raise SystemExit("The help of scan says nothing of its usage.")
