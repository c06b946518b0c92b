"""Universal checkpoints as an output: their entry in the table of kinds."""

from __future__ import annotations

from ckptconv.outputs.kinds import OF_CHECKPOINT, OF_CODES, OF_MODELS, OutputKind

_STATES = (
    "{} applies only to a checkpoint of torch.distributed.checkpoint.",
    (
        "Convert INPUT to such a checkpoint with --to dcp and --states, then convert that checkpoint with --to "
        "universal. A universal checkpoint gets its optimizer states from INPUT."
    ),
)
# Further options without effect on a universal checkpoint depend on its source: see `resuming`.
KIND = OutputKind(
    "universal",
    "tree",
    {**OF_CHECKPOINT, "states": _STATES, **OF_MODELS, **OF_CODES},
    {
        "opaque": "has no effect on a universal checkpoint, which does not store such objects",
        "copy_config": "copies nothing: from_pretrained reads no universal checkpoint",
    },
    to="universal",
    compared="ckptconv.features.universal.with_verify",
    plan="ckptconv.features.universal.output",
)
