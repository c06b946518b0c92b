"""The names of torch's constants: dtypes, layouts and the like."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptconv.pickles.nodes import SPARSE, TorchConstant
from ckptconv.tensors.dtypes import DTYPES

# By kind. Integers of 1 to 7 bits exist by name only: tensors of them are subclasses.
NAMES: Mapping[str, tuple[str, ...]] = {
    "dtype": (*DTYPES, *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))),
    "qscheme": (
        "per_tensor_affine",
        "per_channel_affine",
        "per_tensor_symmetric",
        "per_channel_symmetric",
        "per_channel_affine_float_qparams",
    ),
    "memory_format": ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format"),
    "layout": ("strided", "_mkldnn", "jagged", *SPARSE),
}
_DEVICE = re.compile("[a-z][a-z0-9_]{0,50}(:(?:0|[1-9][0-9]{0,3}))?")


def has(constant: TorchConstant) -> bool:
    """Return whether torch has this constant, or a device may have this name."""
    if constant.kind == "device":
        return _DEVICE.fullmatch(constant.name) is not None
    return constant.name in NAMES.get(constant.kind, ())
