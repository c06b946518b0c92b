"""Files for torch.load as an output: their entry in the table of kinds."""

from __future__ import annotations

from ckptconv.formats.torch import SUFFIXES
from ckptconv.outputs.kinds import ELSEWHERE, OF_CODES, OF_MODELS, OutputKind, only

_STATES = (
    "{} applies only to a checkpoint of torch.distributed.checkpoint.",
    (
        "Add --to dcp. Two files cannot be combined into one .pt file; instead, convert weights and states to one "
        "safetensors file, without --optimizer, and convert this file to .pt."
    ),
)
_KEY = (
    _STATES[0],
    "In Python, torch.save({KEY: ckptconv.load_state_dict(INPUT)}, OUTPUT) writes the weights under KEY.",
)

KIND = OutputKind(
    "weights",
    "file",
    {
        **ELSEWHERE,
        "states": _STATES,
        "model_key": _KEY,
        **only("like partial fill", "safetensors, not to a file for torch.load"),
        **OF_MODELS,
        **OF_CODES,
    },
    {"tied": "has no effect on a .pt file, where all names of a tied tensor share its memory"},
    SUFFIXES,
    "pt",
    "ckptconv.features.torch_output.with_verify",
    "ckptconv.features.torch_output.output",
    "a file for torch.load",
)
