"""A conversion in parts, and finish, for scripts/smoke.py."""

from __future__ import annotations

from typing import Any


def run(smoke: Any) -> None:
    several = ["pt2safetensors", "model.pt", "parts", "--max-shard-size", "30B", "--no-structure"]
    smoke.run(*several, "--part", "0/2")
    smoke.run(*several, "--part", "1/2")
    smoke.run("finish", "parts")
    if "Usage" not in smoke.run("finish", "--help"):
        raise SystemExit("The help of finish says nothing of its usage.")
