"""The kinds of cases: which readers each is for, and what makes them."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckptconv.formats.torch.file import CONTAINERS, STREAM, TAR


class Step(NamedTuple):
    """A change of something, and its name for people."""

    label: str
    change: Callable[[Any], None]


@dataclass(frozen=True)
class Case:
    """A file as the steps that make it, of which any may be left out. `honest`: made as programs make such files."""

    steps: Sequence[Any]
    build: Callable[[Sequence[Any]], bytes] = b"".join
    honest: bool = False

    def data(self) -> bytes:
        return self.build(self.steps)

    def with_steps(self, steps: Sequence[Any]) -> Case:
        return replace(self, steps=steps)

    def told(self) -> list[str]:
        """The steps for people, a line each."""
        return [step.label if isinstance(step, Step) else repr(step) for step in self.steps]


@dataclass(frozen=True)
class Kind:
    """`reads` is the function of ours that the `readers` are compared with. `strict`: what these refuse, so do we."""

    reads: str
    readers: tuple[str, ...]
    suffix: str
    make: Callable[[random.Random], Case]
    strict: bool = False


def lazily(module: str, name: str) -> Callable[[random.Random], Case]:
    """A maker of cases, of a module that needs the classes of this one."""

    def make(chance: random.Random) -> Case:
        made: Case = getattr(importlib.import_module(f"differential.{module}"), name)(chance)
        return made

    return make


_TORCH = ("torch.load", "torch.load, weights_only")
_PICKLE = ("C pickle", "Python pickle", "weights_only pickle")
_ZIP = (*_TORCH, "torch.load, mmap", "zipfile")
KINDS: dict[str, Kind] = {
    "pickle": Kind(
        "pickle", ("C pickle", "Python pickle", "weights_only pickle"), ".pkl", lazily("pickles", "a_pickle")
    ),
    "zip": Kind("torch", _ZIP, ".pt", lazily("archives", "a_zip")),
    **{
        kind: Kind("torch", (*_TORCH, "zipfile"), ".pt", lazily("archives", f"a_{kind}_case"))
        for kind, container in {"tar": TAR, "stream": STREAM}.items()
        if container in CONTAINERS
    },
    "tensors": Kind("torch", _ZIP, ".pt", lazily("tensors", "a_tensor_case")),
    "safetensors": Kind("safetensors", ("safetensors",), ".safetensors", lazily("headers", "a_header"), strict=True),
}
