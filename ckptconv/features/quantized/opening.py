"""A source is opened with weights in the place of quantized ones, if options ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.features.quantized.options import Quantizing
from ckptconv.formats.source import Source


def opened(source: Source, asked: Mapping[str, Any], reaching: Mapping[str, Any]) -> Source:
    """Return `source` with weights in the place of quantized ones, as the options `asked` say; `reaching` say how a
    checkpoint is reached."""
    options = Quantizing(**{name: asked[name] for name in Quantizing.table if name in asked})
    from ckptconv.features.quantized.weights import with_weights

    dtype = asked.get("dtype")
    dtype = "bfloat16" if dtype in (None, "keep") else dtype
    # Weights to quantize anew, exactly, are not rounded before.
    dtype = "" if options.requantize else dtype
    anew = bool(options.quantize or options.requantize)
    return with_weights(source, dtype, reaching.get("storage_options") or {}, anew=anew)
