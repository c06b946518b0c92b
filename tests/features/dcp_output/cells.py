"""What tests of the trunk ask of outputs for torch.distributed.checkpoint too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

import ckptconv
from ckptconv.cli import registered

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


# --------------------------------------------------------------------------------------------------- what is replaced

REFUSED = """\
safetensors2dcp g1.safetensors dcp
safetensors2dcp g1.safetensors hf
safetensors2dcp hf hf
safetensors2dcp g1.safetensors bin
safetensors2dcp g1.safetensors runs --to accelerate
safetensors2dcp g1.safetensors hf --to accelerate
safetensors2dcp g1.safetensors sharded --to dcp-hf
safetensors2dcp g1.safetensors new --manifest a.pt
""" + ("safetensors2dcp g1.safetensors -o zero\n" if "zero-to-fp32" in registered.COMMANDS else "")
DONE: dict[str, set[str]] = {"safetensors2dcp g1.safetensors configured": set()}
AGAIN = """\
safetensors2dcp g1.safetensors new
safetensors2dcp g1.safetensors new --to dcp-hf
safetensors2dcp g1.safetensors new --to accelerate
"""
WRITING: list[Callable[[], object]] = [lambda: ckptconv.convert("a.pt", "step1", to="dcp")]
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {"dcp": ("x", ("safetensors2dcp", "WEIGHTS", "PATH"))}
WHOLE = ["safetensors2dcp model.pt"]

# -------------------------------------------------------------------------------------------------------- the commands

WAYS: dict[str, list[list[Any]]] = {"safetensors2dcp": [["model.safetensors", "dcp"]]}
NAMED = [(None, "safetensors2dcp made.safetensors --output dcp")]
LACKING = [("safetensors2dcp a.safetensors", "OUTPUT is missing")]
MEANT = {"torch_save_to_dcp": "convert --to dcp", "pt2dcp": "convert --to dcp"}


def refused_alone(path: Path, tmp_path: Path) -> list[tuple[object, ...]]:
    return [("safetensors2dcp", path, tmp_path / "dcp")]


def with_manifest(source: Path, here: Path) -> Path:
    """Make an output of `source` that has a manifest."""
    ckptconv.convert(source, here / "dcp", to="dcp", fsync=False)
    return here / "dcp"


OTHER_OPTIONS = {
    "--reset-optimizer": "--to dcp writes optimizer states only with --states",
    "--nproc": "--chunks N splits the tensors",
    "--world-size": "--chunks N splits their tensors for N",
    "--load-dir": "Give INPUT first, then OUTPUT",
    "--pp": "when they load them",
    "--target-tensor-parallel-size": "when they load them",
    "--target-pipeline-parallel-size": "when they load them",
}
