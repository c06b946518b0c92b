"""Virtual checkpoints as an output: their entry in the table of kinds."""

from __future__ import annotations

from ckptconv.features.virtual.description import SUFFIX
from ckptconv.outputs.kinds import ELSEWHERE, IN_SAFETENSORS, OF_MODELS, OutputKind

_NO_DATA = ("{} has no effect: a virtual checkpoint contains no data.", "")
KIND = OutputKind(
    "weights",
    "file",
    {**ELSEWHERE, **dict.fromkeys(("verify", "part", "checksum"), _NO_DATA), **OF_MODELS},
    IN_SAFETENSORS,
    (SUFFIX,),
    compared="",
    plan="ckptconv.features.virtual.output",
    called="a virtual checkpoint",
)
