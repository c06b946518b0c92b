"""What tests of the trunk ask of averages too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv.features.average.options import AVERAGING
from ckptconv.options.table import OPTIONS
from ckptconv.result import Report

MEANT = {"mergekit-yaml": "average"}
# Options of commands that no other command has, by the beginning of the command.
FLAGS = {"average": (AVERAGING,)}


# ---------------------------------------------------------------------------------------------------- what is computed


def _averaging(*steps: str, minus: str = "", **asked: Any) -> Callable[..., Report]:
    def make(here: Any, last: str, out: Any, **options: Any) -> Report:
        base = {"minus": f"{here}/{minus}"} if minus else {}
        return ckptconv.average([f"{here}/{step}" for step in (*steps, last)], out, **base, **asked, **options)

    return make


# What makes an output of `computed.sources`, and the one that verify is to be asked of.
JOBS = {
    "average": (_averaging("a", "b", weights=[1, 2, 3]), "c"),
    "ema": (_averaging("a", ema=0.75), "b"),
    "minus": (_averaging("a", minus="c"), "b"),
}
if "quantize" in OPTIONS:
    JOBS["average-int4"] = (_averaging("a", quantize="int4-g32"), "b")
# Of each kind one.
SOME = [job for job in ("average", "average-int4") if job in JOBS]
# A way to compute, and the job that shows it.
COMPUTING = {"average": JOBS["minus"]}


def MAKE(path: Any, out: Any, **options: Any) -> Report:  # noqa: N802
    """Make an output of one input, given twice."""
    return ckptconv.average([path, path], out, **options)


# ---------------------------------------------------------------------------------------------------- what is printed


def _two() -> None:
    for name, value in (("a", 1.0), ("b", 3.0)):
        save_file({"w": torch.full((4, 4), value)}, f"{name}.safetensors")


# Each command, and what it is called with.
WAYS: dict[str, list[list[str]]] = {
    "average": [["model.safetensors", "model.safetensors", "averaged", "--weights", "1,3"]]
}
# Words that lack something, and what is said.
LACKING = [("average a", "needs at least one STEP")]
COMMANDS = ["average"]
# Commands that name their output by an option, last.
NAMED = [(_two, "average a.safetensors b.safetensors -o average.safetensors")]


# --------------------------------------------------------------------------------------------------- what is replaced

REFUSED = """\
average g1.safetensors g2.safetensors g3.safetensors
average g1.safetensors g2.safetensors
average step1 step2 step3
average step1 step2
average step1 step2 -o step3
average step1 step2 -o step2
average step1 step2 -o hf
average g1.safetensors g2.safetensors linked.safetensors
average g1.safetensors g2.safetensors g3.safetensors --overwrite
average bin step1 -o bin
average g1.safetensors g2.safetensors -o new.safetensors --manifest a.pt
"""
# On a store, where `place` has others' files.
REFUSED_THERE = [
    "average g1.safetensors g2.safetensors {place}/a.safetensors",
    "average g1.safetensors g2.safetensors {place}/hf",
]
DONE: dict[str, set[str]] = {
    "average g1.safetensors g2.safetensors -o g3.safetensors": {"g3.safetensors"},
    "average g1.safetensors g2.safetensors empty": set(),
    "average g1.safetensors g2.safetensors new": set(),
}
AGAIN = """\
average g1.safetensors g2.safetensors new
average g1.safetensors g2.safetensors new.safetensors
"""
# Of these, those that have nothing but their bytes where there are no marks.
BY_BYTES = {"average g1.safetensors g2.safetensors new.safetensors"}
WRITING: list[Callable[[], object]] = [lambda: ckptconv.average(["step1", "step2"], "step3")]
