"""What tests of the trunk ask of Megatron-core's checkpoints too."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from lone_files import STATE, Make, W, making

from ckptconv.cli import registered

from .attacks import FILES

ATTACKS = FILES
# One file of many, and what is to be named in its place; and one that is whole.
PARTS: dict[str, tuple[Make, str]] = {
    "Megatron-core": (making({"iteration": 5, "w": W}, "common.pt", ".metadata"), "dcp2safetensors"),
    "Megatron-core, alone": (
        making({"iteration": 5, "args": argparse.Namespace(lr=1.0)}, "common.pt"),
        "dcp2safetensors",
    ),
    "Megatron-core, of several ranks": (
        making({"args": argparse.Namespace(tensor_model_parallel_size=2)}, "common.pt"),
        "dcp2safetensors",
    ),
}
WHOLE_FILES: dict[str, Make] = {"a model that is called like a part": making(STATE, "common.pt")}


def _commands(file: Path) -> tuple[tuple[str, ...], ...]:
    where = f"megatron_{file.name.partition('.')[0]}/checkpoint"
    convert = ("dcp2safetensors", where, "--json")
    return (
        (*convert, "out"),
        (*convert, "unstacked", "--unstack", "--max-shard-size", "2KB"),
        (*convert, "masters.safetensors", "--master"),
        (*convert, "--optimizer", "states"),
        ("verify", where, "unstacked", "--json"),
        *(("inspect", where) for command in registered.COMMANDS if command == "inspect"),
    )


# Archives of checkpoints: the name of the case, and the commands of the golden set for each.
ARCHIVES = [
    (f"megatron/{file.name}", file, _commands(file))
    for file in sorted((Path(__file__).parent / "data").glob("*.tar.xz"))
]


def _unpacked(step: Path) -> Path:
    from .test_megatron import unpacked

    (saved,) = unpacked("reshardable_tp2_dp2", step.parent / "files").glob("iter_*")
    return saved.rename(step)


# A step of a run, by what writes it to a directory.
ONE_STEP: dict[str, Callable[[Path], Path]] = {"Megatron-core": _unpacked}
