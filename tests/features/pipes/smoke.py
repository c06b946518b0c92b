"""Input from a pipe, for scripts/smoke.py."""

from __future__ import annotations

from typing import Any


def run(smoke: Any) -> None:
    smoke.run(
        "pt2safetensors", "-", "piped.safetensors", *smoke.readable, stdin=(smoke.place / "model.pt").read_bytes()
    )
    smoke.same("model.safetensors", "piped.safetensors")
