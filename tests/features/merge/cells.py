"""What tests of the trunk ask of merges too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpoints import DATA
from faults import tiles

import ckptconv
from ckptconv.features.factors.kernels import LowRank, Magnitude
from ckptconv.features.merge.options import MERGING
from ckptconv.options.table import OPTIONS
from ckptconv.result import Report
from ckptconv.tensors.computing import Tile

# Options of commands that no other command has, by the beginning of the command.
FLAGS = {"merge": (MERGING,)}


# ---------------------------------------------------------------------------------------------------- what is computed


def _merging(adapter: str, **asked: Any) -> Callable[..., Report]:
    return lambda here, base, out, **options: ckptconv.merge(
        f"{here}/{base}", f"{here}/{adapter}", out, **asked, **options
    )


# What makes an output of `computed.sources`, and the one that verify is to be asked of.
JOBS = {"merge": (_merging("lora"), "a"), "dora": (_merging("dora"), "a")}
if "quantize" in OPTIONS:
    JOBS["merge-mxfp8"] = (_merging("lora", dequantize=True, quantize="mxfp8"), "powers")
# Of each kind one.
SOME = [job for job in ("dora", "merge-mxfp8") if job in JOBS]
# A way to compute, and the job that shows it.
COMPUTING = {"merge": JOBS["dora"]}


def _last_bit(tile: Tile, bits: Any) -> None:
    bits[-2] ^= 1


def _another_sign(tile: Tile, bits: Any) -> None:
    bits[7] ^= 128


# Faults of what computes, and the jobs that show each.
MADE = {
    "another scale of the adapter": (tiles(LowRank, scale=lambda kernel: -kernel.scale), ["merge", "merge-mxfp8"]),
    "the last bit of a merged weight": (tiles(LowRank, _last_bit), ["merge"]),
    "the sign of a weight of another length": (tiles(Magnitude, _another_sign), ["dora"]),
}


# ---------------------------------------------------------------------------------------------------- what is printed

# Each command, and what it is called with.
WAYS: dict[str, list[list[str]]] = {
    "merge": [[str(DATA / "peft" / "dora" / "base"), str(DATA / "peft" / "dora" / "adapter"), "merged"]]
}
# Words that lack something, and what is said.
LACKING = [("merge a b", "at least one ADAPTER")]
# What people call it, and options of other programs.
MEANT = {"merge-lora": "merge"}
OTHER_OPTIONS = dict.fromkeys(
    ("--base", "--merge-weights", "--adapter-name-or-path"), "ckptconv merge BASE ADAPTER OUTPUT"
)


# --------------------------------------------------------------------------------------------------- what is replaced

REFUSED = """\
merge base ad1 ad2
merge base ad1 -o ad1
merge base ad1 -o ad2
merge base ad1 -o base
merge base ad1 hf
merge base ad1 ad2 --overwrite
merge base ad1 -o new.safetensors --manifest a.pt
"""
DONE: dict[str, set[str]] = {"merge base ad1 -o g3.safetensors": {"g3.safetensors"}}
AGAIN = "merge base ad1 new\n"
WRITING: list[Callable[[], object]] = [lambda: ckptconv.merge("base", "ad1", "ad2")]
