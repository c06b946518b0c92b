"""Checkpoints of torch.distributed.checkpoint as an output: their entries in the tables of kinds and of directories."""

from __future__ import annotations

import re

from ckptconv.errors import UsageError
from ckptconv.features.dcp.names import FILE, METADATA, SUFFIX
from ckptconv.features.dcp_output.options import GIVEN
from ckptconv.options.table import Options
from ckptconv.outputs.kinds import OF_CODES, OF_MODELS, OF_UNIVERSAL, OutputKind, flag, is_set, only
from ckptconv.outputs.targets import MANIFEST, Directory

CALLED = "a checkpoint of torch.distributed.checkpoint"
# The value of `model_key` without weights.
NO_WEIGHTS = "none"
# The refusals of options that take tensors from a reference.
OF_WEIGHTS = dict.fromkeys(
    ("partial", "fill"),
    ("{} does not apply: for this output, --like specifies how tensors are split, not which are written.", ""),
)
# Without states, it is for a new optimizer.
NO_STATES = only("fresh_optimizer", "a universal checkpoint", "Leave it out: only --states writes optimizer states.")
_STATES = "Give --states PATH."


def check_states(options: Options) -> None:
    """Raise UsageError for options that contradict each other about weights and states."""
    chosen = GIVEN.of(options)
    for name in ("optimizer_key", "flat_optimizer", "fill_states") if not options.states else ():
        if is_set(name, options):
            raise UsageError(f"{flag(name)} applies only to optimizer states, but none were requested.", _STATES)
    if chosen.model_key == NO_WEIGHTS and not options.states:
        raise UsageError("--model-key none leaves out the weights, so the output would be empty.", _STATES)


def check(options: Options) -> None:
    """Raise UsageError for options that contradict an output of torch.distributed.checkpoint."""
    check_states(options)
    if is_set("like", options) and GIVEN.of(options).chunks is not None:
        raise UsageError("--chunks and --like both specify how to split tensors: give only one of them.")


def check_of_ranks(options: Options) -> None:
    """Raise UsageError as `check` does, and for files of a size, where each rank has one file."""
    check(options)
    if options.max_shard_size:
        raise UsageError("--max-shard-size cannot be used here: each rank has one file.", "Give --chunks N.")


# Checkpoints of torch.distributed.checkpoint have the names that torch gives them.
_NAMES = rf"{FILE}|{re.escape(METADATA)}|{re.escape(MANIFEST)}"
DIRECTORY = Directory(METADATA, lambda name: re.fullmatch(_NAMES, name) is not None, shards=(SUFFIX,))
KIND = OutputKind(
    "dcp",
    "dcp",
    {**OF_UNIVERSAL, **NO_STATES, **OF_WEIGHTS, **OF_MODELS, **OF_CODES},
    {"copy_config": f"copies nothing: from_pretrained reads no {CALLED.removeprefix('a ')}"},
    to="dcp",
    compared="ckptconv.features.dcp_output.with_verify",
    plan="ckptconv.features.dcp_output.output",
    called=CALLED,
    check=check,
    like="ckptconv.features.dcp_output.imitating",
)
