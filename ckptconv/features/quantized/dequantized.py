"""Messages and metadata of an output about weights dequantized at opening. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.computed import Computing
from ckptconv.outputs.selected import Selected
from ckptconv.text import some

# In the names of the stacked experts of mlx-lm.
MLX_EXPERTS = ".switch_mlp."


def _formats(source: Source) -> Mapping[str, Any]:
    formats = source.quantized.formats if source.quantized else {}
    return {"dequantized": dict(sorted(formats.items()))}


def _told(chosen: Selected, source: Source, options: Options, reference: Selected | None) -> Selected:
    """Return `chosen` with a note if tensors keep another dtype than the weights that were quantized, and a warning if
    its experts have names that only mlx-lm knows."""
    dtype = source.quantized.dtype if source.quantized and source.quantized.formats else ""
    if dtype and chosen.dtype == "keep" and not reference:
        floats = {name: tensor.dtype for name, tensor in chosen.tensors.items() if tensor.dtype.kind == "f"}
        others = [name for name, own in floats.items() if own.name != dtype and name not in chosen.uncastable]
        dtypes = some(sorted({floats[name].name for name in others}), form=str)
        if others:
            note = (
                f"tensors that were not quantized and remain {dtypes}: {some(others, 2)}. --dtype {dtype} casts them "
                "too."
            )
            chosen = chosen._replace(notes=(*chosen.notes, note))
    stacked = [name for name in chosen.tensors if MLX_EXPERTS in name]
    if not stacked:
        return chosen
    warning = f"The experts keep their mlx-lm names, such as {stacked[0]!r}; transformers does not load these."
    return chosen._replace(warnings=(*chosen.warnings, warning))


COMPUTING = Computing(
    heading={"dequantized?": {str: int}},
    selected=_told,
    record=_formats,
    reported=lambda source: {"dequantized": dict(source.computed["dequantize"].formats)},
)
