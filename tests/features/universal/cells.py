"""What tests of the trunk ask of universal checkpoints too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faults import Plant, wrapped
from hypothesis import strategies as st
from lone_files import Make, W, moved
from safetensors.torch import save_file

import ckptconv
from ckptconv.features.universal import trees

# ----------------------------------------------------------------------------------------------------------- options

# Of each option: its default, a value, and how that may be written; and values that it has not.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {
    "universal": ("", "u", [Path("u"), "u"]),
    "zero_stage": (None, 3, ["3", 3]),
    "fresh_optimizer": (False, True, [True]),
}
REFUSED_VALUES: dict[str, list[Any]] = {"universal": [3, b"o"], "zero_stage": [0, 4, True, 1.0, "x", ""]}
DECIDING = {"zero_stage": st.integers(1, 3), "fresh_optimizer": st.booleans()}
# What becomes of each option in each kind of output of the trunk.
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {
    "zero_stage": ("rrrrrrrr", {"zero_stage": 3}),
    "fresh_optimizer": ("rrrrrrrr", {"fresh_optimizer": True}),
}

# ------------------------------------------------------------------------------------------------------ kind of output

# The options by what becomes of them: heeded, refused, or said to have no effect.
_OUTCOMES = {
    "h": "zero_stage fresh_optimizer exclude_frozen_parameters clobber verify checksum part manifest digest attest "
    "depfile dry_run",
    "r": "quantize requantize keep chunks states model_key optimizer_key flat_optimizer fill_states for_hub",
    "s": "max_shard_size dtype dequantize key include exclude strip_prefix rename map size tied like partial fill "
    "structure order opaque copy_config layers experts component vocab graft config",
}
# What asks for it, and what becomes of each option.
KINDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "universal": (
        {"universal": "x"},
        {option: outcome for outcome, options in _OUTCOMES.items() for option in options.split()},
    )
}

# --------------------------------------------------------------------------------------------------- one file of many


def _one_of_many(place: Path) -> Path:
    save_file({"w": W, "b": torch.ones(4)}, place / "model.safetensors")
    ckptconv.convert(place / "model.safetensors", universal=place / "universal", fsync=False)
    return next((place / "universal").rglob("zero/w/fp32.pt"))


PARTS: dict[str, tuple[Make, str]] = {
    "universal": (_one_of_many, "zero-to-fp32 {0.parent.parent.parent}"),
    "universal, alone": (moved(_one_of_many, "fp32.pt"), "zero-to-fp32"),
}

# --------------------------------------------------------------------------------------------------- what is replaced


def scene(here: Path) -> None:
    """Put a training with a universal checkpoint of others beside what others made."""
    (here / "trained").mkdir()
    (here / "trained" / "latest_universal").write_text("global_step7_universal")


REFUSED = """\
convert zero new --universal dcp
convert zero new --universal uni
convert zero new --universal uni --overwrite
convert zero new --universal trained/step
convert zero new --universal hf/uni
convert hf new --universal hf/uni
convert zero new --universal zero/global_step3/uni
convert zero new --universal bin/uni --overwrite
convert zero new --universal trained --overwrite
convert zero new --universal=
pt2safetensors train.pt new --universal hf
zero-to-fp32 zero --universal hf
dcp2safetensors dcp new --universal step2
"""
DONE: dict[str, set[str]] = {
    "convert zero new --optimizer new/optimizer --universal new/universal": set(),
    "convert zero new --universal zero/uni": set(),
    "convert zero new --universal trained/step --overwrite": {"trained/latest_universal"},
}
AGAIN = """\
convert train.pt new --universal trained2
"""
WRITING: list[Callable[[], object]] = [lambda: ckptconv.convert("zero", "new", universal="uni")]
REFUSED_THERE = ["convert zero {place}/new --universal {place}/uni"]
AGAIN_THERE = ["convert train.pt --universal {place}/step"]
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {
    "universal": ("x", ("zero-to-fp32", "RUN", "--universal", "PATH"))
}
WHOLE = ["convert model.pt --universal"]

# ------------------------------------------------------------------------------------------------------- verification


def _made(source: Path, output: str) -> dict[str, Any]:
    ckptconv.convert(source, universal=output)
    return {"universal": output}


RECORDED = {"universal": _made}
FAULTS: dict[str, tuple[Plant, dict[str, Any]]] = {
    "another universal checkpoint is the latest": (
        wrapped(trees, "latest", lambda right, directory: right(f"{directory}0")),
        {"source": "z2_bf16_w2", "output": "universal"},
    )
}
# Commands of the golden set for a ZeRO checkpoint.
OF_ZERO = [
    ("zero-to-fp32", "in", "--json", "--universal", "universal"),
    ("verify", "in", "--universal", "universal", "--json"),
    ("zero-to-fp32", "universal", "again", "--json"),
]
