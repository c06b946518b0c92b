"""What tests of the trunk, and of other features, ask of DeepSpeed too."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import ZERO
from lone_files import STATE, Make, W, making, moved

import ckptconv
from ckptconv.cli.registered import COMMANDS as GROUPED
from ckptconv.options.registered import missing
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import FURTHER
from ckptconv.outputs.kinds import KINDS as KINDS_HERE

from .attacks import FILES
from .zero_writer import Model, Save, write

ATTACKS = FILES

# ------------------------------------------------------------------------------------------------------------- command

# The command, and a name of its output.
FORMATS = {"zero-to-fp32": "out.safetensors"}
COMMANDS = ["zero-to-fp32"]
# Words that people use for it.
MEANT = {
    "zero2fp32": "zero-to-fp32",
    "zero_to_fp32.py": "zero-to-fp32",
    "zero3-to-safetensors": "zero-to-fp32",
    "deepspeed": "zero-to-fp32",
}
_Z3 = ZERO / "z3_bf16_w2/checkpoint"
# A checkpoint of a training, with weights and states.
TRAINED = [_Z3]
# The dtype and the size of files that are the default of the command, in words.
DEFAULTS = [("zero-to-fp32", "float32", "5GB")]
# A checkpoint of this format, its name, and the command for it.
MAKERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "deepspeed": (lambda path: shutil.copytree(_Z3, path), "in", "zero-to-fp32")
}
# Commands, and what they are called with, one after another.
WAYS: dict[str, list[list[Any]]] = {
    "zero-to-fp32": [[_Z3, "out"], [_Z3, *(f"--{name}={name}" for name in FURTHER)]],
    "convert": [[_Z3, "out", "--dry-run"]],
    # Of features, where they are here.
    **{
        command: [[*words]]
        for command, words in {
            "diff": (_Z3, _Z3, "--with-states", "--top", "2"),
            "inspect": (_Z3, "--as", "bf16"),
        }.items()
        if command in GROUPED
    },
}
# A command that reads any input, whether it has an OUTPUT, and whether it says of a bad one what `pt2safetensors` says.
READERS = {"zero-to-fp32": (True, False)}
USAGE = [("zero-to-fp32 model.pt", "zero-to-fp32", "model.pt")]
SAID = [
    ("zero-to-fp32 'my model.pt' out", 2, "ckptconv pt2safetensors 'my model.pt'"),
    ("pt2safetensors run", 2, "ckptconv zero-to-fp32 run OUTPUT"),
    ("zero-to-fp32 '' out.safetensors", 2, "The path of the input is empty.;not set?"),
]
# Of a line that ends where the cursor is, what may stand there.
TYPED = {"ckptconv zero_to_fp32 --ta": ["--tag"]}

# --------------------------------------------------------------------------------------------------- one file of many


def _of(case: str, name: str) -> Make:
    def make(place: Path) -> Path:
        shutil.copytree(ZERO / case / "checkpoint", place / "run")
        return next((place / "run").rglob(name))

    return make


PARTS: dict[str, tuple[Make, str]] = {
    name: (make, "zero-to-fp32")
    for name, make in {
        "ZeRO-3, model": _of("z3_bf16_exclfrozen_w2", "zero_pp_rank_0*model_states.pt"),
        "ZeRO-3, model, of another name": moved(_of("z3_bf16_exclfrozen_w2", "zero_pp_rank_0*model_states.pt")),
        "ZeRO-3, optimizer": _of("z3_bf16_exclfrozen_w2", "*rank_1*optim_states.pt"),
        "ZeRO-3, optimizer, of another name": moved(_of("z3_bf16_exclfrozen_w2", "*rank_1*optim_states.pt")),
        "ZeRO-2, optimizer": _of("z2_bf16_w2", "*rank_0*optim_states.pt"),
        "ZeRO-1, optimizer, of another name": moved(_of("z1_bf16_w2", "*rank_0*optim_states.pt")),
        "old ZeRO-3, model": making(
            {"module": {"w": torch.empty(0), "n": W}, "buffer_names": ["n"], "dp_world_size": 2}, "m.pt"
        ),
        "experts": _of("moe_z2_ep2_w2", "layer_0_expert_1*"),
        "without its experts": _of("moe_z2_ep2_w2", "mp_rank_00_model_states.pt"),
        "a layer": _of("pipe_z1_pp2_w2", "layer_00-model_states.pt"),
        "a stage": _of("pipe_z1_pp2_w2", "mp_rank_00_model_states.pt"),
        "tensor parallel": _of("tp_z2_mp2_w4", "mp_rank_01_model_states.pt"),
        "tensor parallel, of another name": moved(_of("tp_z2_mp2_w4", "mp_rank_01_model_states.pt")),
        "experts' optimizer": making(STATE, "expp_rank_0_mp_rank_00_optim_states.pt"),
    }.items()
}


def _of_universal(place: Path) -> Path:
    torch.save({"w": W, "b": torch.ones(4)}, place / "model.pt")
    ckptconv.convert(place / "model.pt", universal=place / "universal", fresh_optimizer=True, fsync=False)
    (place / "model.pt").unlink()
    return next((place / "universal").rglob("zero/w/fp32.pt"))


if "universal" in KINDS_HERE:
    PARTS["universal"] = (_of_universal, "zero-to-fp32 {0.parent.parent.parent}")
    PARTS["universal, alone"] = (moved(_of_universal, "fp32.pt"), "zero-to-fp32")
TAKEN_ALONE = ["ZeRO-3, model", "a layer"]
LYING_ELSEWHERE = ["ZeRO-3, model"]
WHOLE_FILES: dict[str, Make] = {"ZeRO-0": _of("z0_bf16_w2", "mp_rank_00_model_states.pt")}
MAYBE_WHOLE = [
    (
        _of("z2_bf16_w2", "mp_rank_00_model_states.pt"),
        "in the optimizer files. To convert the master weights: ckptconv zero-to-fp32",
    )
]

# --------------------------------------------------------------------------------------------------- what is replaced


def scene(here: Path) -> None:
    """Put a run of DeepSpeed beside what others made."""
    shutil.copytree(ZERO / "z2_bf16_frozen_w2/checkpoint", here / "zero")


REFUSED = """\
convert a.pt zero
convert zero hf
convert zero new --optimizer step1
convert zero new --optimizer g1.safetensors
convert zero new --optimizer new
convert zero new.safetensors --optimizer new.safetensors
convert zero hf --overwrite --no-clobber
zero-to-fp32 zero -o step1
zero-to-fp32 zero new --optimizer step1
zero-to-fp32 zero new --manifest a.pt
"""
if "universal" in KINDS_HERE:
    REFUSED += """\
convert zero new --universal zero/global_step3/uni
zero-to-fp32 zero --universal hf
"""
if "attest" in OPTIONS:
    REFUSED += "zero-to-fp32 zero new --digest sha256 --attest notes.md\n"
DONE: dict[str, set[str]] = {"convert zero -o b.pt": {"b.pt"}} if "safetensors2pt" in GROUPED else {}
AGAIN = """\
convert zero new --optimizer new/optimizer
zero-to-fp32 zero new
""" + ("" if missing("output_dir") else "convert hf zero --output-dir fresh\n")
WRITING: list[Callable[[], object]] = [lambda: ckptconv.convert("zero", "new", optimizer="hf")]
REFUSED_THERE = ["convert zero {place}/new --optimizer {place}/hf"]
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {
    "optimizer": ("x.safetensors", ("zero-to-fp32", _Z3, "OWN", "--optimizer", "PATH"))
}


# --------------------------------------------------------------------------------------------------------- trainings


def _saved(stage: int) -> Callable[..., None]:
    """What saves parameters as a step of two ranks: matrices with weight decay, vectors without."""

    def save(place: Path, tensors: dict[str, torch.Tensor], tied: dict[str, str] | None = None) -> None:
        matrices = {name: tensor for name, tensor in tensors.items() if tensor.dim() > 1}
        vectors = {name: tensor for name, tensor in tensors.items() if tensor.dim() < 2}
        groups = [group for group in (matrices, vectors) if group]
        write(place, Model(groups=groups, tied=tied or {}), Save(stage=stage, world=2))

    return save


TRAININGS = {"ZeRO-2": _saved(2), "ZeRO-3": _saved(3)}


def _fuzz(chance: random.Random, place: Path) -> str:
    from features.deepspeed.fuzzing import fuzz_zero

    return fuzz_zero(chance, place)


_CONVERT = ("zero-to-fp32", "in", "--json")
_RULE = ("--depfile", "model.d") if "depfile" in OPTIONS else ()
_COMMANDS: tuple[tuple[str, ...], ...] = (
    (*_CONVERT, "out"),
    (*_CONVERT, "model.safetensors", "--manifest", "manifest.json", *_RULE),
    (*_CONVERT, "kept", "--dtype", "keep", "--tied", "duplicate", "--max-shard-size", "20KB"),
    (*_CONVERT, "frozen", "--exclude-frozen-parameters", "--exclude", "*.bias", "--rename", "^a=b"),
    (*_CONVERT, "ranks", "--per-rank"),
    (*_CONVERT, "--optimizer", "states"),
    (*_CONVERT, "parts", "--part", "0/2"),
    (*_CONVERT, "parts", "--part", "1/2"),
    ("finish", "parts", "--json"),
    ("verify", "in", "out", "--json"),
    (*_CONVERT, "--universal", "universal"),
    ("verify", "in", "--universal", "universal", "--json"),
    ("zero-to-fp32", "universal", "again", "--json"),
    ("inspect", "in"),
    ("inspect", "in", "--json"),
    ("inspect", "in", "--html", "page.html"),
    ("safetensors2pt", "out", "back.pt", "--json"),
    ("convert", "in", "converted", "--json"),
    ("convert", "out", "merged.safetensors", "--dtype", "bf16", "--json"),
)
# Checkpoints of the golden set, and the commands for each.
CHECKPOINTS = [(f"zero/{name}", ZERO / name / "checkpoint", _COMMANDS) for name in ZERO.names]
# Words that need neither torch nor numpy.
COPYING = [["zero-to-fp32", _Z3, "zero.safetensors", *(f"--{name}={name}" for name in FURTHER)]]
FUZZED = {"zero": _fuzz}
# A step of a run, by what writes it to a directory.
ONE_STEP: dict[str, Callable[[Path], Path]] = {
    "DeepSpeed": lambda step: Path(shutil.copytree(_Z3 / "global_step3", step))
}
