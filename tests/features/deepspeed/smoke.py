"""zero-to-fp32, for scripts/smoke.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ZERO = Path(__file__).parent / "data" / "z3_bf16_w2" / "checkpoint"


def run(smoke: Any) -> None:
    smoke.run("zero-to-fp32", ZERO, "zero", *smoke.verifying)
    smoke.run("zero-to-fp32", ZERO, "zero.safetensors", "--dtype", "fp16", "--optimizer", "adam", "--tied", "duplicate")
    smoke.run("convert", ZERO, "two")
    smoke.run("zero-to-fp32", "--help")
