"""safetensors2pt, for scripts/smoke.py: safetensors become a file for torch.load."""

from __future__ import annotations

from typing import Any


def run(smoke: Any) -> None:
    smoke.run("safetensors2pt", "first.safetensors", "first.pt")
    smoke.run("safetensors2pt", "model.safetensors", "model2.pt", *smoke.verifying)
    smoke.verify("model.safetensors", "model2.pt")
