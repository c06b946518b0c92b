"""What tests of the trunk, and of others, ask of maps too."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckptconv
from ckptconv.features.maps.compile import apply_map
from ckptconv.features.maps.file import from_catalogue
from ckptconv.features.maps.kernels import Arithmetic
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Convert, Inline, LazyTensor

# How a map is applied, and found by its name; and what frameworks made of tiny models.
MAPS: dict[str, Any] = {"apply": apply_map, "named": from_catalogue, "data": Path(__file__).parent / "data"}

# Of each option: its default, a value, and how that may be written; and values that it has not.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {
    "map": ("", "m.toml", [Path("m.toml"), "m.toml"]),
    "size": ({}, {"n": 32}, [{"n": 32}, {"n": "32"}, "n=32", ["n=32"]]),
}
REFUSED_VALUES: dict[str, list[Any]] = {
    "map": [3, b"m"],
    "size": ["n", "=3", "n=", "n=x", "n=-1", {"n": -1}, {"n": 1.0}, {3: 1}, ["n=1", "n=2"], 3],
}
# What becomes of each option in each kind of output.
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {
    "map": ("hhhh", {"map": "../map.toml"}),
    "size": ("ssss", {"size": {"n": 4}}),
}
# Options that a conversion says something of, by source.
TELLING: list[tuple[str, dict[str, Any]]] = [("zero3", {"size": {"n": 3}})]
# Commands that write nothing, and those whose printing is tried elsewhere.
READING = PRINTED = {"maps", "maps show", "maps check"}

MAP = """
[[rule]]
one = "model.layers.{l}.mlp.{p}_proj.weight : a b"
other = "layers.{l}.{p} : b a"
"""


def _mapped(here: Path, source: str, out: Path) -> None:
    (here / "x.toml").write_text(MAP)
    ckptconv.convert(here / source, out, map=here / "x.toml")


# A way to compute, and what shows it.
COMPUTING = {"map": (_mapped, "a")}


# ----------------------------------------------------------------------------------------------------- its kernel

_NUMBERS = Inline(np.arange(1, 9, dtype="<f4").tobytes(), DTYPES["float32"], (8,))
SAMPLES: dict[type[Any], LazyTensor] = {
    Arithmetic: Convert(_NUMBERS, Arithmetic("float32", "*", 1.25), DTYPES["float32"])
}
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def _computed(kernel: Arithmetic, data: Any) -> Any:
    dtype = getattr(torch, kernel.dtype)
    made = _OPERATIONS[kernel.operation](
        torch.from_numpy(data.copy()).view(dtype), torch.tensor(kernel.number).to(dtype)
    )
    return made.view(torch.uint8).numpy()


# What it makes of the bytes of a move.
EVALUATED: dict[type[Any], Callable[[Any, Any], Any]] = {Arithmetic: _computed}
# Expressions that cannot be, and why.
REFUSED_KERNELS = {
    "arithmetic with integers": (
        ["convert", ["zeros", "int32", [4]], ["arithmetic", "int32", "*", 2.0], "int32"],
        "does not yield",
    ),
    "arithmetic with zero": (
        ["convert", ["zeros", "float32", [4]], ["arithmetic", "float32", "*", 0.0], "float32"],
        "does not yield",
    ),
    "an operation that is none": (
        ["convert", ["zeros", "float32", [4]], ["arithmetic", "float32", "**", 2.0], "float32"],
        "does not yield",
    ),
}

# What people call them, and how they are written.
MEANT = {"map": "convert --map NAME"}
