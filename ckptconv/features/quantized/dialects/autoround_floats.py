"""AutoRound's floats, and its MXINT4: `export/export_to_autoround/{qlinear_fp,qlinear_int,export_to_fp8}.py` and
`experimental/qmodules` of 0.16. Their words are in `autoround`.

Floats lie as those of compressed-tensors. The scales of FP8 have one dimension, and the dtype of the model as it was
quantized, which is float32 on most CPUs: AutoRound's layer rounds them, and the weight, to bfloat16. It has no layer
for FP8 of weights alone, which is written without `packing_format`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckptconv.features.quantized.configuration import Configuration
from ckptconv.features.quantized.dialects import Dialect
from ckptconv.features.quantized.dialects.autoround import FLOATS, FP8_STATIC, METHODS, NATIVE, scheme_of
from ckptconv.features.quantized.table import FLOATS as DTYPES
from ckptconv.features.quantized.table import FP8, MXFP4, NVFP4, Part, Sizes


def _of(called: str, packing: str | None, *scheme: Any) -> Callable[[Configuration, str], Iterator[tuple[str, Sizes]]]:
    """Return the `Format.sizes` of weights of this type, bits, and size of groups."""

    def sizes(config: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
        if config.method in METHODS and config.told.get("packing_format") == packing:
            said = scheme_of(config, name)
            size = said["group_size"]
            if (said["data_type"], said["bits"], size) == scheme:
                yield called, {"B": 1 if size else "M", "C": size if size > 0 else "K"}

    return sizes


_ROUNDED = FP8._replace(parts={**FP8.parts, "scale": Part("+_scale", DTYPES, "M/B K/C", cast="bfloat16")})
_FORMATS = (
    MXFP4._replace(sizes=_of("MXFP4", FLOATS, "mx_fp", 4, 32)),
    MXFP4._replace(codes="quarters", sizes=_of("MXINT4", NATIVE, "mx_int", 4, 32)),
    FP8._replace(sizes=_of("MXFP8", FLOATS, "mx_fp", 8, 32)),
    NVFP4._replace(sizes=_of("NVFP4", FLOATS, "nv_fp", 4, 16)),
    _ROUNDED._replace(sizes=_of("FP8", FP8_STATIC, "fp", 8, 0)),
    _ROUNDED._replace(sizes=_of("FP8 by rows", FP8_STATIC, "fp", 8, -1)),
    FP8._replace(sizes=_of("FP8", None, "fp", 8, 0)),
    FP8._replace(sizes=_of("FP8 by rows", None, "fp", 8, -1)),
)
DIALECT = Dialect(_FORMATS, {})
