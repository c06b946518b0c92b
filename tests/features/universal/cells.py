"""What tests of the trunk ask of universal checkpoints too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import Plant, wrapped
from hypothesis import strategies as st

import ckptconv
from ckptconv.features.universal import trees

# ----------------------------------------------------------------------------------------------------------- options

# Of each option: its default, a value, and how that may be written; and values that it has not.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {
    "universal": ("", "u", [Path("u"), "u"]),
    "zero_stage": (None, 3, ["3", 3]),
    "fresh_optimizer": (False, True, [True]),
}
MEANT = {"universal": "convert --to universal"}
REFUSED_VALUES: dict[str, list[Any]] = {"universal": [3, b"o"], "zero_stage": [0, 4, True, 1.0, "x", ""]}
DECIDING = {"zero_stage": st.integers(1, 3), "fresh_optimizer": st.booleans()}
# What becomes of each option in each kind of output of the trunk.
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {
    "zero_stage": ("rrrr", {"zero_stage": 3}),
    "fresh_optimizer": ("rrrr", {"fresh_optimizer": True}),
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

# --------------------------------------------------------------------------------------------------- what is replaced


def scene(here: Path) -> None:
    """Put a training with a universal checkpoint of others beside what others made."""
    (here / "trained").mkdir()
    (here / "trained" / "latest_universal").write_text("global_step7_universal")


REFUSED = """\
convert train.pt new --universal uni
convert train.pt new --universal uni --overwrite
convert train.pt new --universal trained/step
convert train.pt new --universal hf/uni
convert hf new --universal hf/uni
convert train.pt new --universal bin/uni --overwrite
convert train.pt new --universal trained --overwrite
convert train.pt new --universal=
pt2safetensors train.pt new --universal hf
"""
DONE: dict[str, set[str]] = {
    "convert train.pt new --optimizer new/optimizer --universal new/universal": set(),
    "convert train.pt new --universal trained/step --overwrite": {"trained/latest_universal"},
}
AGAIN = """\
convert train.pt new --universal trained2
"""
WRITING: list[Callable[[], object]] = [lambda: ckptconv.convert("train.pt", "new", universal="uni")]
REFUSED_THERE = ["convert train.pt {place}/new --universal {place}/uni"]
AGAIN_THERE = ["convert train.pt --universal {place}/step"]
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {
    "universal": ("x", ("convert", "MODEL", "--universal", "PATH", "--fresh-optimizer"))
}
WHOLE = ["convert model.pt --universal"]

# ------------------------------------------------------------------------------------------------------- verification


def _made(source: Path, output: str) -> dict[str, Any]:
    ckptconv.convert(source, universal=output)
    return {"universal": output}


OTHER_OPTIONS = {
    "--input-folder": "Give both without options: ckptconv convert INPUT OUTPUT --to universal.",
    "--num-extract-workers": "Use --jobs N",
}
RECORDED = {"universal": _made}
FAULTS: dict[str, tuple[Plant, dict[str, Any]]] = {
    "another universal checkpoint is the latest": (
        wrapped(trees, "latest", lambda right, directory: right(f"{directory}0")),
        {"source": "z2_bf16_w2", "output": "universal"},
    )
}
SAID = [
    (
        "convert model.pt out --to universal --zero-stage 0",
        2,
        "--zero-stage '0' is not a number from 1 to 3. Stage 0 does not load universal checkpoints.",
    )
]
