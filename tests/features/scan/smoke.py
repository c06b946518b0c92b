"""scan, for scripts/smoke.py: neither torch nor numpy need be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / "data"
_OF_RANKS = Path(__file__).parents[1] / "dcp" / "data" / "fsdp2_w2_nested" / "checkpoint"
STEPS = DATA / "zero" / "z3_bf16_w2" / "checkpoint", *([_OF_RANKS] if _OF_RANKS.exists() else [])


def run(smoke: Any) -> None:
    smoke.run("scan", "--sarif", "scan.sarif", "model.pt", "model.safetensors", *STEPS)
    if "Usage" not in smoke.run("scan", "--help"):
        raise SystemExit("The help of scan says nothing of its usage.")
