"""What tests of the trunk ask of `diff` too."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckptconv
from ckptconv.features.diff.options import COMPARING

# Options of the command that no other has.
FLAGS = {"diff": (COMPARING,)}
# Functions of the library that are given a path, and those that open it.
PATHS: dict[str, Callable[[Any], object]] = {"diff": lambda value: ckptconv.diff("model.pt", value)}
OPENING: list[Callable[[Any], object]] = [lambda path: ckptconv.diff(path, path)]


# ---------------------------------------------------------------------------------------------------- what is printed


def _other() -> None:
    torch.save({"model": {"w": torch.tensor([1, 2.0, math.nan]), "x": torch.zeros(2)}}, "other.pt")


# The command, and what it is called with, one after another.
WAYS: dict[str, list[list[Any]]] = {"diff": [["model.pt", "model.safetensors"]]}
# Words that people use for it.
MEANT = {"compare": "diff"}

# Commands that find that something differs, after something was done.
UNEQUAL: list[tuple[Callable[[], object], list[str]]] = [
    (_other, ["diff", "model.pt", "other.pt"]),
    (_other, ["diff", "model.pt", "other.pt", "--rtol", "1"]),
]
SAID = [("diff none none --html gone/page.html", 2, "the directory gone does not exist")]


def refused_alone(path: Path, here: Path) -> list[tuple[object, ...]]:
    """The words that take a file, which is one of many, for a model."""
    other = here / "other" / "model.safetensors"
    return [("diff", other, path), ("diff", path, other)]


# --------------------------------------------------------------------------------------------------- what is replaced

REFUSED = """\
diff --html notes.md g1.safetensors g2.safetensors
diff --html g1.safetensors g1.safetensors g2.safetensors
diff --html hard.safetensors g1.safetensors g2.safetensors --overwrite
"""
DONE: dict[str, set[str]] = {"diff --html page.html g1.safetensors g1.safetensors --overwrite": {"page.html"}}
AGAIN = """\
diff --html new.html g1.safetensors g1.safetensors
"""
WRITING: list[Callable[[], object]] = [lambda: ckptconv.diff("g1.safetensors", "g2.safetensors", html="a.pt")]
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {
    "page of differences": ("x.html", ("diff", "WEIGHTS", "OTHER", "--html", "PATH"))
}
