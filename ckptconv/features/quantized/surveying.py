"""The quantized weights in the report of `inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptconv.errors import CkptconvError
from ckptconv.features.quantized.parts import parts_among
from ckptconv.features.reporting.quantized import QuantizedGroup, QuantizedSummary
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.naming import tree_of
from ckptconv.structure import keymap
from ckptconv.tensors.lazy import LazyTensor

if TYPE_CHECKING:
    from ckptconv.features.quantized.joining import Recognized


def survey(
    source: Source,
    kept: Mapping[str, LazyTensor],
    which: Options,
    storage_options: Mapping[str, Any],
    warnings: list[str],
) -> QuantizedSummary | None:
    """Return the quantized weights among the tensors `kept`, which `which` choose; add a reason to `warnings` if they
    cannot be recognized."""
    if source.quantized or not parts_among(kept):
        return None
    from ckptconv.features.quantized.weights import surveyed

    try:
        described = keymap.describe(tree_of(source, which)).quantized if source.structured else {}
        joined = surveyed(source, kept, described, storage_options)
    except CkptconvError as error:
        warnings.append(f"The weights are quantized, but --dequantize cannot convert them: {error.message}")
        return None
    return _summed(kept, joined) if joined.weights else None


def _summed(tensors: Mapping[str, LazyTensor], joined: Recognized) -> QuantizedSummary:
    """Return what of these `tensors` is quantized; `found` are their weights."""
    formats: dict[str, QuantizedGroup] = {}
    bits: Counter[str] = Counter()
    for weight in joined.weights.values():
        group = formats.setdefault(weight.format, QuantizedGroup())
        group.weights += 1
        group.parameters += weight.tensor.numel
        bits[weight.format] += weight.bits
    for name, group in formats.items():
        group.bits_per_weight = round(bits[name] / group.parameters, 3) if group.parameters else 0.0
    others = sum(tensor.numel for name, tensor in tensors.items() if name not in joined.gone)
    return QuantizedSummary(others + sum(group.parameters for group in formats.values()), formats)
