"""diff --delta and patch, for scripts/smoke.py: where zstandard is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def run(smoke: Any) -> None:
    if find_spec("zstandard") is None:
        return
    smoke.run("diff", "model.safetensors", "model.safetensors", "--delta", "delta")
    smoke.run("patch", "model.safetensors", "delta", "patched.safetensors")
    smoke.same("model.safetensors", "patched.safetensors")
    smoke.run(
        *("diff", "model.safetensors", "model.safetensors", "--delta", "xxh3", "--delta-checksum", "xxh3-128"),
        code=0 if find_spec("xxhash") else 2,
    )
