"""What an output says of weights that were made of quantized ones when its source was opened. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.formats.source import Source
from ckptconv.outputs.computed import Computing


def _formats(source: Source) -> Mapping[str, Any]:
    formats = source.quantized.formats if source.quantized else {}
    return {"dequantized": dict(sorted(formats.items()))}


COMPUTING = Computing(
    heading={"dequantized?": {str: int}},
    record=_formats,
    reported=lambda source: {"dequantized": dict(source.computed["dequantize"].formats)},
)
