"""Universal checkpoints as an output: their entry in the table of kinds."""

from __future__ import annotations

from ckptconv.outputs.kinds import OF_CHECKPOINT, OF_CODES, OF_MODELS, OutputKind

# What else changes nothing in a universal checkpoint depends on its source: see `resuming`.
KIND = OutputKind(
    "universal",
    "tree",
    {**OF_CHECKPOINT, **OF_MODELS, **OF_CODES},
    {
        "opaque": "changes nothing in a universal checkpoint, which has no place for other objects",
        "copy_config": "copies nothing: from_pretrained reads no universal checkpoint",
    },
    to="universal",
    compared="ckptconv.features.universal.comparing",
    plan="ckptconv.features.universal.output",
)
