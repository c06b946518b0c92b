"""What tests of the trunk ask of checkpoints of torch.distributed.checkpoint too."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from lone_files import Make, moved

import ckptconv
from ckptconv.cli import registered
from ckptconv.outputs.kinds import KINDS as _KINDS

from .attacks import FILES
from .cases import DCP, checkpoint_of

ATTACKS = FILES
NESTED = checkpoint_of("fsdp2_w2_nested")
# A checkpoint of a training, with weights and states.
TRAINED = [NESTED]

# ------------------------------------------------------------------------------------------------------------- options

_TEXT = st.text(max_size=5)
# Of each option: its default, a value, and how that may be written; values that it has not; and any that it has.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {
    "chunks": (None, 3, [3, np.uint8(3), "3"]),
    "model_key": ("", "model", ["model"]),
    "optimizer_key": ("", "optim", ["optim"]),
    "flat_optimizer": (False, True, [True]),
    "fill_states": (False, True, [True]),
}
REFUSED_VALUES: dict[str, list[Any]] = {
    "chunks": [0, -1, (1 << 20) + 1, True, 1.5, "", "all"],
    "model_key": [3, b"x", ["a"], True],
    "optimizer_key": [3, b"x", ["a"], True],
}
DECIDING = {
    "chunks": st.integers(1, 1 << 20),
    "model_key": _TEXT,
    "optimizer_key": _TEXT,
    "flat_optimizer": st.booleans(),
    "fill_states": st.booleans(),
}

# ----------------------------------------------------------------------------------------------------- kinds of output

# The options by what becomes of them in each kind of output: heeded, refused, or said to have no effect.
_OUTCOMES = {
    "dcp": {
        "h": "max_shard_size dtype key include exclude strip_prefix rename tied like structure chunks states "
        "model_key opaque exclude_frozen_parameters clobber verify checksum part manifest digest depfile "
        "dry_run map attest dequantize layers experts component vocab graft",
        "r": "partial fill optimizer_key flat_optimizer fill_states zero_stage fresh_optimizer for_hub quantize "
        "requantize keep",
        "s": "order copy_config size config",
    },
    "dcp-hf": {
        "h": "dtype key include exclude strip_prefix rename like chunks states model_key exclude_frozen_parameters "
        "clobber verify checksum part manifest digest depfile dry_run map attest dequantize layers experts component "
        "vocab graft",
        "r": "max_shard_size partial fill optimizer_key flat_optimizer fill_states zero_stage fresh_optimizer "
        "for_hub quantize requantize keep",
        "s": "tied structure order opaque copy_config size config",
    },
    "accelerate": {
        "h": "max_shard_size dtype key include exclude strip_prefix rename tied structure chunks states opaque "
        "exclude_frozen_parameters clobber verify checksum part manifest digest depfile dry_run map attest "
        "dequantize layers experts component vocab graft",
        "r": "like partial fill model_key optimizer_key flat_optimizer fill_states zero_stage fresh_optimizer "
        "for_hub quantize requantize keep",
        "s": "order copy_config size config",
    },
}
# What asks for each kind, and what becomes of each option.
KINDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    kind: (
        {"output": "x", "to": kind},
        {option: outcome for outcome, options in outcomes.items() for option in options.split()},
    )
    for kind, outcomes in _OUTCOMES.items()
}
# What becomes of each option in the trunk's kinds of output; and the option.
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {
    "chunks": ("rrrr", {"chunks": 2}),
    "model_key": ("rrrr", {"model_key": "weights"}),
    "optimizer_key": ("rrrr", {"optimizer_key": "opt"}),
    "flat_optimizer": ("rrrr", {"flat_optimizer": True}),
    "fill_states": ("rrrr", {"fill_states": True}),
}


def make_like(here: Path) -> None:
    """Make what such an output can be like."""
    ckptconv.convert(here / "model", here / "like.dcp", to="dcp", chunks=3)


# --------------------------------------------------------------------------------------------------- one file of many


def _shard(place: Path) -> Path:
    shutil.copytree(checkpoint_of("hf_sharded_w2"), place / "step")
    return place / "step/shard-00001-model-00001-of-00002.safetensors"


PARTS: dict[str, tuple[Make, str]] = {
    "DCP's safetensors": (_shard, "dcp2safetensors {0.parent}"),
    "DCP's safetensors, of another name": (moved(_shard, "model.safetensors"), "dcp2safetensors"),
}
LONELY = ["DCP's safetensors, of another name"]


def refused_alone(path: Path, tmp_path: Path) -> list[tuple[object, ...]]:
    return [("safetensors2dcp", path, tmp_path / "dcp")]


# --------------------------------------------------------------------------------------------------- what is replaced


def scene(here: Path) -> None:
    """Put a step of a training among what others made."""
    shutil.copytree(NESTED, here / "dcp")


def _of(command: str, *lines: str) -> str:
    """Lines of words for a command, or for an option of another feature, that may not be here."""
    return "".join(f"{line}\n" for line in lines) if command in {*registered.COMMANDS, *_KINDS} else ""


REFUSED = (
    """\
convert a.pt dcp
convert a.pt dcp --overwrite
dcp2safetensors dcp hf
dcp2safetensors dcp -o sharded
dcp2safetensors dcp new --optimizer step2
dcp2safetensors dcp new --manifest a.pt
dcp2safetensors dcp new --depfile Makefile
safetensors2dcp g1.safetensors dcp
safetensors2dcp g1.safetensors hf
safetensors2dcp hf hf
safetensors2dcp g1.safetensors bin
safetensors2dcp g1.safetensors runs --to accelerate
safetensors2dcp g1.safetensors hf --to accelerate
safetensors2dcp g1.safetensors sharded --to dcp-hf
safetensors2dcp g1.safetensors new --manifest a.pt
safetensors2dcp g1.safetensors new --depfile Makefile
"""
    + _of("zero-to-fp32", "convert zero dcp", "zero-to-fp32 zero dcp", "safetensors2dcp g1.safetensors -o zero")
    + _of("average", "average step1 step2 dcp")
    + _of("patch", "diff --delta dcp g1.safetensors g2.safetensors")
    + _of("rows", "rows split kv1.pt -o dcp --embedding-dim 64 --method adagrad")
    + _of("universal", "convert train.pt new --universal dcp", "dcp2safetensors dcp new --universal step2")
)
DONE: dict[str, set[str]] = {"safetensors2dcp g1.safetensors configured": set()}
AGAIN = """\
safetensors2dcp g1.safetensors new
safetensors2dcp g1.safetensors new --to dcp-hf
safetensors2dcp g1.safetensors new --to accelerate
dcp2safetensors dcp new
"""
WRITING: list[Callable[[], object]] = [lambda: ckptconv.convert("a.pt", "step1", to="dcp")]
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {"dcp": ("x", ("safetensors2dcp", "WEIGHTS", "PATH"))}
WHOLE = ["safetensors2dcp model.pt"]

# -------------------------------------------------------------------------------------------------------- the commands

COMMANDS = ["dcp2safetensors"]
# A command for a format, and the name of its output.
FORMATS = {"dcp2safetensors": "out.safetensors"}
# How a checkpoint is made, what it is called, and the command for its format.
MAKERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "dcp": (lambda path: shutil.copytree(NESTED, path), "in", "dcp2safetensors")
}
WAYS: dict[str, list[list[Any]]] = {
    "dcp2safetensors": [[NESTED, "out"]],
    "safetensors2dcp": [["model.safetensors", "dcp"]],
    **{command: [[NESTED]] for command in registered.COMMANDS if command == "inspect"},
}
READERS = {"dcp2safetensors": (True, False)}
NAMED = [(None, "safetensors2dcp made.safetensors --output dcp")]
LACKING = [("safetensors2dcp a.safetensors", "OUTPUT is missing")]
MEANT = {
    "fsdp2safetensors": "dcp2safetensors",
    "dcp_to_torch_save": "convert --to pt",
    "torch_save_to_dcp": "convert --to dcp",
    "pt2dcp": "convert --to dcp",
    "format_utils": "dcp2safetensors",
}
# The dtype and the size of files that are the default of a command, in words.
DEFAULTS = [("dcp2safetensors", "keep", "5GB")]

# ---------------------------------------------------------------------------------------------------- golden set, fuzz

_CONVERT = ("dcp2safetensors", "in", "--json")
_COMMANDS: tuple[tuple[str, ...], ...] = (
    (*_CONVERT, "out"),
    (*_CONVERT, "all", "--key", ".", "--max-shard-size", "20KB"),
    (*_CONVERT, "model.safetensors", "--dtype", "bf16"),
    (*_CONVERT, "--optimizer", "states"),
    ("verify", "in", "out", "--json"),
    *(("inspect", "in", *words) for words in ((), ("--json",)) if "inspect" in registered.COMMANDS),
    ("safetensors2pt", "all", "back.pt", "--json"),
    ("convert", "in", "converted.safetensors", "--json"),
    ("convert", "all", "again", "--max-shard-size", "10KB", "--json"),
)
# Checkpoints of the golden set, and the commands for each.
CHECKPOINTS = [(f"dcp/{case.name}", case / "checkpoint", _COMMANDS) for case in sorted(DCP.iterdir())]


def _fuzzed(chance: random.Random, place: Path) -> str:
    """A checkpoint with its metadata changed, or one of its parts."""
    from fuzz import of_bytes, of_pickle, outcome

    checkpoint, output = place / "checkpoint", place / "out.safetensors"
    shutil.rmtree(checkpoint, ignore_errors=True)
    case = chance.choice(["dtensor_noncontig_w2", "ddp_w2", "fsdp2_w2_nested", "torch2.3.1_dtensor_w2"])
    shutil.copytree(checkpoint_of(case), checkpoint)
    victim = chance.choice([*[checkpoint / ".metadata"] * 4, *sorted(checkpoint.iterdir())])
    data = victim.read_bytes()
    if victim.name == ".metadata" and chance.random() < 0.8:
        victim.write_bytes(of_pickle(data, chance))
    elif chance.random() < 0.1:
        victim.unlink()
    else:
        victim.write_bytes(of_bytes(data, chance))
    ended = outcome(checkpoint, output)
    output.unlink(missing_ok=True)
    return ended


FUZZED = {"dcp": _fuzzed}


def with_manifest(source: Path, here: Path) -> Path:
    """Make an output of `source` that has a manifest."""
    ckptconv.convert(source, here / "dcp", to="dcp", fsync=False)
    return here / "dcp"


# Words that need neither torch nor numpy.
COPYING = [["dcp2safetensors", NESTED, "dcp", "--max-shard-size", "1KB"]]

# ----------------------------------------------------------------------------------------------------------- elsewhere

# A checkpoint of this format, by its name.
SERVED = {"dcp": checkpoint_of("hsdp_2x2")}
# Checkpoints, and what torch makes of them; and one whose entries are compressed.
EQUAL = [(checkpoint_of(case), DCP / case / "expected.pt") for case in ("fsdp2_w2_nested", "tp_fsdp_2x2")]
COMPRESSED = [DCP / "zstd_w2"]
# What is asked of a store: the command, the checkpoint, its name there, and that of the output.
ASKED = [("dcp2safetensors", checkpoint_of("fsdp2_w4_bf16"), "dcp", "joined")]
# Sources of faults that verify finds.
SOURCES_OF_FAULTS = {name: checkpoint_of(name) for name in ("tp_fsdp_2x2", "dtensor_noncontig_w2")}
# Calls that open a checkpoint.
OPENING = [ckptconv.DistributedReader]
# Checkpoints that are opened, and read as their conversions.
OPENED = sorted(path for path in DCP.glob("*/checkpoint") if path.is_dir())


def _saved(state_of: Callable[[int], dict[str, torch.Tensor]], step: Path, seed: int) -> Sequence[str]:
    dcp.save({"model": state_of(seed), "step": seed}, checkpoint_id=step, no_dist=True)
    return ["__0_0.distcp", ".metadata"]


def _load(step: Path) -> None:
    state = {"a.weight": torch.empty(40, 30), "b.weight": torch.empty(50)}
    dcp.load({"model": state}, checkpoint_id=step, no_dist=True)


# How a step of a run is saved, with the state that a function makes of its number; how it is loaded; and its name.
SAVERS = {"dcp": (_saved, _load, "step-{}")}
# A step of a run, by what writes it to a directory.
ONE_STEP: dict[str, Callable[[Path], Path]] = {"dcp": lambda step: Path(shutil.copytree(NESTED, step))}
