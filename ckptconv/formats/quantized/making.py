"""Makes the parts of quantized weights of weights: the formats of `table`, read the other way. Pure."""

from __future__ import annotations

import struct

from ckptconv.formats.quantized import joining
from ckptconv.formats.quantized.table import Way
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Axis, Inline, LazyTensor, Tiled, View
from ckptconv.tensors.moves import Quantize
from ckptconv.tensors.quantize import layout, made_dtype


def unfit(tensor: LazyTensor, way: Way, exact: bool) -> str:
    """Return why a tensor cannot be quantized so; "" if it can. Only if it is to be `exact`, groups may be cut short:
    programs load whole ones."""
    dims, columns = len(tensor.shape), way.sizes["C"]
    if dims < 2 or dims > (2 if "shape" in way.format.parts else 3):
        return f"{dims} dimension{'s' if dims != 1 else ''}"
    if not tensor.numel:
        return "no elements"
    # Tiles at the edges may be smaller.
    is_whole = way.sizes["B"] > 1 or exact or tensor.shape[-1] % columns == 0
    return "" if is_whole else f"rows of no multiple of {columns} elements"


def parts(name: str, tensor: LazyTensor, way: Way, exact: bool) -> dict[str, LazyTensor]:
    """Return the parts of a quantized weight by name, made of `tensor`, which is not `unfit`.

    `exact`: they have to give the weight back, bit for bit.
    """
    made: dict[str, LazyTensor] = {}
    for role in ("codes", "scale", "shape"):
        if role not in way.format.parts:
            continue
        part = way.format.parts[role]
        if role == "shape":
            data = struct.pack("<qq", *tensor.shape)
            made[joining.name_of(name, part)] = Inline(data, DTYPES["int64"], (2,))
            continue
        what = "codes" if role == "codes" else "scales"
        sides = way.sizes["B"], way.sizes["C"]
        kernel = Quantize(what, way.codes, way.scale, *sides, way.largest, way.power, exact, name)
        shape = joining.shape_of(part, tensor.shape, way.sizes)
        of_tiles = tiles_of(kernel, tensor, shape)
        is_other = role == "scale" and way.stored != way.scale
        made[joining.name_of(name, part)] = View(of_tiles, DTYPES[way.stored], shape) if is_other else of_tiles
    return made


def tiles_of(kernel: Quantize, tensor: LazyTensor, shape: tuple[int, ...]) -> Tiled:
    """Return the codes or the scales of this shape that `kernel` makes of `tensor`."""
    axes, whole = layout(kernel, len(tensor.shape))
    dtype, starts = DTYPES[made_dtype(kernel)], (0,) * len(shape)
    return Tiled((tensor,), (tuple(Axis(*axis) for axis in axes),), kernel, dtype, shape, starts, whole)
