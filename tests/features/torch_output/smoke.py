"""safetensors2pt, for scripts/smoke.py: safetensors become a file for torch.load."""

from __future__ import annotations

from typing import Any

from cells import VERIFY


def run(smoke: Any) -> None:
    smoke.run("safetensors2pt", "first.safetensors", "first.pt")
    smoke.run("safetensors2pt", "model.safetensors", "model2.pt", *VERIFY)
    smoke.run("verify", "model.safetensors", "model2.pt")
