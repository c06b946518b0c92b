"""What tests of the trunk ask of checkpoints of torch.distributed.checkpoint too."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lone_files import Make, moved

from ckptconv.cli import registered
from ckptconv.outputs.kinds import KINDS as _KINDS

from .attacks import FILES
from .cases import CASES, DCP, checkpoint_of

ATTACKS = FILES
NESTED = checkpoint_of("fsdp2_w2_nested")
# A checkpoint of a training, with weights and states.
TRAINED = [NESTED]

# --------------------------------------------------------------------------------------------------- one file of many


def _shard(place: Path) -> Path:
    shutil.copytree(checkpoint_of("hf_sharded_w2"), place / "step")
    return place / "step/shard-00001-model-00001-of-00002.safetensors"


PARTS: dict[str, tuple[Make, str]] = {
    "DCP's safetensors": (_shard, "dcp2safetensors {0.parent}"),
    "DCP's safetensors, of another name": (moved(_shard, "model.safetensors"), "dcp2safetensors"),
}
LONELY = ["DCP's safetensors, of another name"]


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
"""
    + _of("zero-to-fp32", "convert zero dcp", "zero-to-fp32 zero dcp")
    + _of("average", "average step1 step2 dcp")
    + _of("patch", "diff --delta dcp g1.safetensors g2.safetensors")
    + _of("rows", "rows split kv1.pt -o dcp --embedding-dim 64 --method adagrad")
    + _of("universal", "convert train.pt new --universal dcp", "dcp2safetensors dcp new --universal step2")
)
AGAIN = """\
dcp2safetensors dcp new
"""

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
    **{command: [[NESTED]] for command in registered.COMMANDS if command == "inspect"},
}
READERS = {"dcp2safetensors": (True, False)}
MEANT = {
    "fsdp2safetensors": "dcp2safetensors",
    "dcp_to_torch_save": "convert --to pt",
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
CHECKPOINTS = [(f"dcp/{case.name}", case / "checkpoint", _COMMANDS) for case in CASES.values()]


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


# Words that need neither torch nor numpy.
COPYING = [["dcp2safetensors", NESTED, "dcp", "--max-shard-size", "1KB"]]

# ----------------------------------------------------------------------------------------------------------- elsewhere

# A checkpoint of this format, by its name.
SERVED = {"dcp": checkpoint_of("hsdp_2x2")}
# Checkpoints, and what torch makes of them; and one whose entries are compressed.
EQUAL = [(checkpoint_of(case), DCP / case / "expected.pt") for case in ("fsdp2_w2_nested", "tp_fsdp_2x2")]
COMPRESSED = [path for name, path in CASES.items() if name == "zstd_w2"]
# What is asked of a store: the command, the checkpoint, its name there, and that of the output.
ASKED = [("dcp2safetensors", checkpoint_of("fsdp2_w4_bf16"), "dcp", "joined")]
# Sources of faults that verify finds.
SOURCES_OF_FAULTS = {name: checkpoint_of(name) for name in ("tp_fsdp_2x2", "dtensor_noncontig_w2")}
# Checkpoints that are opened, and read as their conversions.
OPENED = [path for path in map(checkpoint_of, CASES) if path.is_dir()]


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
