"""What tests of the trunk ask of conversions in parts too."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckptconv
from ckptconv.options.table import OPTIONS

# ----------------------------------------------------------------------------------------------------------- options

# Of the option: its default, a value, and how that may be written; values that it has not; and what becomes of it in
# each kind of output.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {"part": (None, (0, 2), [(0, 2), [0, 2], "0/2"])}
REFUSED_VALUES: dict[str, list[Any]] = {
    "part": [(3, 2), (0, 0), (-1, 2), (0,), (0, 1, 2), (0, True), (0.0, 2), "3/2", "1", 3, {0: 2}]
}
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {"part": ("hhhh", {"part": (0, 2)})}
# Options of one conversion, which several do not have.
OF_ONE = ["--part=0/2"]

# ---------------------------------------------------------------------------------------------------------- the call

CALLS: dict[str, Callable[..., Any]] = {"finish": lambda **options: ckptconv.finish(["out"], **options)}
MISSPELT = [("finish", "checksums", "checksum")]
WRONG_VALUES: list[tuple[str, str, Any]] = [("finish", "fsync", "no"), ("finish", "storage_options", 3)]
# What takes a path, and what takes several.
PATHS: dict[str, Callable[[Any], object]] = {"finish": ckptconv.finish}
SEVERAL = ["finish"]

# ---------------------------------------------------------------------------------------------------- what is printed

COMMANDS = ["finish"]
# What goes before, each command, and what it is called with.
BEFORE = [["pt2safetensors", "--part", "0/1", "model.pt", "parts"]]
WAYS: dict[str, list[list[str]]] = {"pt2safetensors": [["model.pt", "--part", "0/2"]], "finish": [["parts"]]}
# Words that are wrong, the command, and its input.
USAGE = [("finish nothing", "finish", "nothing")]

# --------------------------------------------------------------------------------------------------- what is replaced


def scene(here: Path) -> None:
    """Put parts beside what others made."""
    ckptconv.convert(here / "a.pt", here / "parts", part="0/1", digest="sha256")


REFUSED = """\
convert a.pt new --part=
finish parts --manifest notes.md
finish parts --manifest a.pt
""" + ("finish parts --attest notes.md\n" if "attest" in OPTIONS else "")
REFUSED_THERE = ["convert a.pt {place}/hf --part 0/2 --max-shard-size 16B"]
DONE: dict[str, set[str]] = {"finish parts --manifest notes.md --overwrite": {"notes.md"}}
WRITING: list[Callable[[], object]] = [lambda: ckptconv.finish("parts", manifest="a.pt")]
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {"part": ("x", ("convert", "MODEL", "PATH", "--part", "0/1"))}

# --------------------------------------------------------------------------------------------------------- at random


def _fuzz(chance: random.Random, place: Path) -> str:
    from features.parts.fuzzing import fuzz_parts

    return fuzz_parts(chance, place)


FUZZED = {"parts": _fuzz}


# ------------------------------------------------------------------------------------------------------- progress


def _finished(model: Any, here: Any, bar: Any) -> None:
    ckptconv.convert(model, here / "parted", part="0/1")
    ckptconv.finish(here / "parted", checksum=True, progress=bar)


# Calls that move bytes, and show their progress: with a model, a directory, and a bar.
MOVING: list[Callable[[Any, Any, Any], object]] = [_finished]
