"""What tests of the trunk ask of steps of torch_checkpointing too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lone_files import STATE, Make, making
from safetensors.torch import load_file

from .step_files import write_step

# The options by what becomes of them in such an output: heeded, refused, or said to have no effect.
_OUTCOMES = {
    "h": "dtype dequantize key include exclude strip_prefix rename map structure chunks states model_key opaque "
    "layers experts component vocab graft exclude_frozen_parameters clobber verify checksum part manifest digest "
    "attest depfile dry_run",
    "r": "max_shard_size quantize requantize keep like partial fill optimizer_key flat_optimizer fill_states "
    "zero_stage fresh_optimizer for_hub",
    "s": "size tied order copy_config config",
}
# What asks for it, and what becomes of each option.
KINDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "torch-checkpointing": (
        {"output": "x", "to": "torch-checkpointing"},
        {option: outcome for outcome, options in _OUTCOMES.items() for option in options.split()},
    )
}
# One file of many, and what is to be named in its place; and one that may be all, and what is said of it.
PARTS: dict[str, tuple[Make, str]] = {
    "torch_checkpointing": (making(STATE, "model_0.safetensors", "metadata.pkl"), "directory of the step")
}
MAYBE_WHOLE = [(making(STATE, "model_1.safetensors"), "a name like a rank's file of torch_checkpointing, but")]
REFUSED = """\
safetensors2dcp g1.safetensors hf --to torch-checkpointing
"""
AGAIN = """\
safetensors2dcp g1.safetensors new --to torch-checkpointing
"""
# A checkpoint of this format, by its name.
SERVED = {"step-2": Path(__file__).parent / "data" / "2d-2x2-st" / "step-2"}


def _saved(state_of: Callable[[int], dict[str, torch.Tensor]], step: Path, seed: int) -> Sequence[str]:
    shutil.rmtree(step, ignore_errors=True)
    write_step(step, state_of(seed), 2)
    return ["model_0.safetensors", "model_1.safetensors", "metadata.pkl"]


def _load(step: Path) -> None:
    assert (step / "metadata.pkl").read_bytes()[-1:] == b"."
    for rank in range(2):
        load_file(step / f"model_{rank}.safetensors")


# How a step of a run is saved, with the state that a function makes of its number; how it is loaded; and its name.
SAVERS = {"torch_checkpointing": (_saved, _load, "step_{}")}
# A step of a run, by what writes it to a directory.
ONE_STEP: dict[str, Callable[[Path], Path]] = {
    "torch_checkpointing": lambda step: Path(shutil.copytree(SERVED["step-2"], step))
}
