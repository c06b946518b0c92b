"""What tests of the trunk ask of deltas too."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv.features.deltas.comparing import COMPARING as OF_DIFF
from ckptconv.features.deltas.kernels import Overlay, Xor
from ckptconv.features.deltas.options import PATCHING, PATCHING_TOO
from ckptconv.tensors.computing import Joined
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor

# Options of commands that no other command has, by the beginning of the command.
FLAGS = {"patch": (PATCHING, PATCHING_TOO)}


# ---------------------------------------------------------------------------------------------------- what is computed


def _patch(here: Path, base: str, out: Path) -> None:
    ckptconv.diff(here / base, here / "b", delta=here / "delta")
    ckptconv.patch(here / base, here / "delta", out)


# A way to compute, and what shows it.
COMPUTING: dict[str, tuple[Callable[..., object], str]] = {"patch": (_patch, "a")}


OCTETS = Inline(bytes(range(1, 33)), DTYPES["uint8"], (32,))
PAIRS = Inline(bytes(range(64)), DTYPES["uint16"], (32,))
# A tensor of each kernel.
SAMPLES: dict[type[Any], LazyTensor] = {
    Xor: Joined((OCTETS, OCTETS, OCTETS), Xor(3), DTYPES["uint8"]),
    Overlay: Joined((OCTETS, PAIRS), Overlay(1), DTYPES["uint8"]),
}
# How each is joined of bytes, others of the same shape, and pairs of bytes; and what it makes of their bytes.
CHANGES: list[Callable[..., LazyTensor]] = [
    lambda one, other, pairs: Joined((one, other, one), Xor(3), one.dtype),
    lambda one, other, pairs: Joined((other, pairs, pairs), Overlay(2), one.dtype),
]


def _laid_over(parts: Any) -> Any:
    made, *layers = parts
    for units in layers:
        made = made & ~units[..., 1:] | units[..., :1] & units[..., 1:]
    return made


CHANGED: dict[type[Any], Callable[[Any], Any]] = {Xor: np.bitwise_xor.reduce, Overlay: _laid_over}


def _xor_of(kernel: Xor, data: Any) -> Any:
    blocks = (block.tolist() for block in np.split(data, kernel.blocks))
    return np.array([functools.reduce(operator.xor, each) for each in zip(*blocks, strict=True)], "u1")


def _overlay_of(kernel: Overlay, data: Any) -> Any:
    data, *layers = np.split(data, [len(data) * (1 + 2 * n) // (1 + 2 * kernel.layers) for n in range(kernel.layers)])
    for units in layers:
        rows = zip(data, units[::2], units[1::2], strict=True)
        data = np.array([(b | m) ^ (m & ~v) for b, v, m in rows], "u1")
    return data


# What each makes of the bytes of a move, byte by byte.
EVALUATED: dict[type[Any], Callable[[Any, Any], Any]] = {Xor: _xor_of, Overlay: _overlay_of}
# Expressions that cannot be, and why.
REFUSED_KERNELS = {
    "a difference of other parts": (
        ["joined", [["zeros", "uint8", [4]], ["zeros", "uint8", [4]]], ["xor", 1 << 62], "uint8"],
        "does not yield",
    ),
    "changes of other bytes": (
        ["joined", [["zeros", "uint8", [4]], ["zeros", "uint16", [5]]], ["overlay", 1 << 60], "uint8"],
        "does not yield",
    ),
}


def _of_delta(place: Path) -> Path:
    for name, value in (("old", 0.0), ("new", 1.0)):
        save_file({"w": torch.full((3, 4), value)}, place / f"{name}.safetensors")
    ckptconv.diff(place / "old.safetensors", place / "new.safetensors", delta=place / "delta")
    return next((place / "delta").glob("*.safetensors"))


# Files that are one of many, and what to name in their place.
PARTS = {"a delta": (_of_delta, "patch BASE {0.parent}")}


# ---------------------------------------------------------------------------------------------------- what is printed


def _two() -> None:
    for name, value in (("a", 1.0), ("b", 3.0)):
        save_file({"w": torch.full((4, 4), value)}, f"{name}.safetensors")
    ckptconv.diff("a.safetensors", "b.safetensors", delta="delta")


# Each command, and what it is called with, where `BEFORE` was done.
BEFORE = [["diff", "model.pt", "model.safetensors", "--delta", "delta"]]
WAYS: dict[str, list[list[Any]]] = {
    "diff": [["model.pt", "model.safetensors", "--delta", "d"]],
    "patch": [["model.safetensors", "delta", "patched"]],
}
# Words that lack something, and what is said.
LACKING = [("patch a b", "needs a BASE, at least one DELTA")]
SAID = [
    (
        f"diff model.pt model.pt {option.flags[0]} {value}",
        2,
        f"{option.flags[0]} requires --delta: it applies only to a delta;--delta DIR",
    )
    for option, value in zip(list(OF_DIFF.values())[1:], ("overwrite", "blake3", 2), strict=True)
]
# Commands that name their output by an option, last.
NAMED = [(_two, "patch a.safetensors delta -o patched.safetensors")]
# Functions of the library that are given a path.
PATHS: dict[str, Callable[[Any], object]] = {
    "patch": lambda value: ckptconv.patch(value, "delta", "out"),
    "patch's deltas": lambda value: ckptconv.patch("model.pt", [value], "out"),
    "patch's output": lambda value: ckptconv.patch("model.pt", "delta", value),
}


# --------------------------------------------------------------------------------------------------- what is replaced


def scene(here: Path) -> None:
    """Put the deltas d1 and d2 beside what others made."""
    ckptconv.diff(here / "g1.safetensors", here / "g2.safetensors", delta=here / "d1", delta_version=1)
    ckptconv.diff(here / "g2.safetensors", here / "g3.safetensors", delta=here / "d2", delta_version=2)


REFUSED = """\
patch g1.safetensors d1 d2
patch g1.safetensors d1 -o d2
patch g1.safetensors d1 hf
patch g1.safetensors d1 g3.safetensors
patch g1.safetensors d1 d2 -o g1.safetensors
patch g1.safetensors d1 d2 -o new.safetensors --manifest notes.md
diff --delta hf g1.safetensors g2.safetensors
diff --delta hf g1.safetensors g2.safetensors
diff --delta ad1 g1.safetensors g2.safetensors
"""
DONE: dict[str, set[str]] = {"patch g1.safetensors d1 -o g3.safetensors": {"g3.safetensors"}}
AGAIN = """\
patch g1.safetensors d1 new
diff --delta new g1.safetensors g2.safetensors
"""
WRITING: list[Callable[[], object]] = [
    lambda: ckptconv.patch("g1.safetensors", "d1", "hf"),
    lambda: ckptconv.diff("g1.safetensors", "g2.safetensors", delta="hf"),
]
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {"delta": ("x", ("diff", "WEIGHTS", "OTHER", "--delta", "PATH"))}
