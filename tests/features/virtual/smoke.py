"""virtual, for scripts/smoke.py: a description is read as the file that it describes."""

from __future__ import annotations

from typing import Any


def run(smoke: Any) -> None:
    smoke.run("pt2safetensors", "model.pt", "written.safetensors", *smoke.readable)
    smoke.run("virtual", "model.pt", "step.virtual.json")
    smoke.run("convert", "step.virtual.json", "described.safetensors", *smoke.readable)
    smoke.verify("step.virtual.json", "written.safetensors", *smoke.readable)
    smoke.same("written.safetensors", "described.safetensors")
    if "Usage" not in smoke.run("virtual", "--help"):
        raise SystemExit("The help of virtual says nothing of its usage.")
