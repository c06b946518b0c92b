"""Makes the parts of quantized weights of weights: the formats of `table`, read the other way. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ckptconv.features.quantized import joining
from ckptconv.features.quantized.computing import Dequantize, Largest, Quantize, QuantizeFp4, Rescale
from ckptconv.features.quantized.fp4 import fp4_dtype, fp4_layout, largest_axes
from ckptconv.features.quantized.quantize import (
    LARGEST_BLOCK,
    MOST_SCALES,
    layout,
    made_dtype,
    rescaled_axes,
    rescaled_dtype,
)
from ckptconv.features.quantized.table import Way
from ckptconv.tensors import casting
from ckptconv.tensors.computing import Axis, Tiled
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Convert, Inline, LazyTensor, Tagged, View, untagged

# Numbers of a row of which the largest is looked for at once.
_MOST_COLUMNS = 1 << 16


def unfit(tensor: LazyTensor, way: Way, exact: bool) -> str:
    """Return why a tensor cannot be quantized so; "" if it can. Only if it is to be `exact`, groups may be cut short:
    programs load whole ones."""
    dims = len(tensor.shape)
    if exact and casting.unrounded(untagged(tensor)).dtype.itemsize > 4:
        return "sums in float64"
    if way.codes == "e2m1" and exact:
        powers = _of_powers(tensor)
        if powers and powers.parts[1].numel > MOST_SCALES:
            return f"more than {MOST_SCALES >> 20} Mi scales"
        return "" if powers else "codes that are not MXFP4 along rows"
    if dims < 2 or dims > (2 if "shape" in way.format.parts or way.rule else 3):
        return f"{dims} dimension{'s' if dims != 1 else ''}"
    if not tensor.numel:
        return "no elements"
    _, columns = _sides(tensor, way)
    if columns > LARGEST_BLOCK:
        return f"rows of more than {LARGEST_BLOCK >> 20} Mi elements"
    # Tiles at the edges may be smaller.
    is_whole = way.sizes["B"] > 1 or exact or tensor.shape[-1] % columns == 0
    return "" if is_whole else f"rows whose length is not a multiple of {columns}"


def _sides(tensor: LazyTensor, way: Way) -> tuple[int, int]:
    """Return the sides of the blocks that have a scale."""
    columns = way.sizes["C"]
    return way.sizes["B"], tensor.shape[-1] if columns == "K" else columns


def parts(
    name: str, tensor: LazyTensor, way: Way, exact: bool, together: Sequence[LazyTensor] = ()
) -> dict[str, LazyTensor]:
    """Return the parts of a quantized weight by name, computed from `tensor`, which is not `unfit`.

    `exact`: they have to give the weight back, bit for bit. `together` are weights that have the same scale of a whole
    weight, this one among them.
    """
    parts_by_name: dict[str, LazyTensor] = {}
    if way.codes == "e2m1":
        return _rescaled(name, tensor, way) if exact else _of_four_bits(name, tensor, way, together or (tensor,))
    for role in ("codes", "scale", "shape"):
        if role not in way.format.parts:
            continue
        part = way.format.parts[role]
        if role == "shape":
            data = struct.pack("<qq", *tensor.shape)
            parts_by_name[joining.name_of(name, part)] = Inline(data, DTYPES["int64"], (2,))
            continue
        what = "codes" if role == "codes" else "scales"
        kernel = Quantize(what, way.codes, way.scale, *_sides(tensor, way), way.largest, way.power, exact, name)
        shape = joining.shape_of(part, tensor.shape, way.sizes)
        of_tiles = tiles_of(kernel, tensor, shape)
        is_other = role == "scale" and way.stored != way.scale
        parts_by_name[joining.name_of(name, part)] = View(of_tiles, DTYPES[way.stored], shape) if is_other else of_tiles
    return parts_by_name


def tiles_of(kernel: Quantize, tensor: LazyTensor, shape: tuple[int, ...]) -> Tiled:
    """Return the codes or the scales of this shape that `kernel` computes from `tensor`."""
    axes, whole = layout(kernel, len(tensor.shape))
    dtype, starts = DTYPES[made_dtype(kernel)], (0,) * len(shape)
    return Tiled((tensor,), (tuple(Axis(*axis) for axis in axes),), kernel, dtype, shape, starts, whole)


def _of_four_bits(name: str, tensor: LazyTensor, way: Way, together: Sequence[LazyTensor]) -> dict[str, LazyTensor]:
    """Return the parts of MXFP4 or NVFP4 of any weight."""
    rows, columns = tensor.shape
    inner = way.format.scale
    of_scales = inner.parts["codes"] if inner else way.format.parts["scale"]
    whole = [_scale_of(together, way.rule, name)] if inner else []
    parts_by_name: dict[str, LazyTensor] = {}
    for what, part, width in (("codes", way.format.parts["codes"], 2), ("scales", of_scales, way.sizes["C"])):
        kernel = QuantizeFp4(what, way.rule, name)
        axes, tile = fp4_layout(kernel)
        shape, dtype = (rows, columns // width), DTYPES[fp4_dtype(kernel)]
        tiles = Tiled((tensor, *whole), _axes(axes), kernel, dtype, shape, (0, 0), tile)
        stored = DTYPES[way.stored] if what == "scales" else dtype
        parts_by_name[joining.name_of(name, part)] = tiles if stored == dtype else View(tiles, stored, shape)
    if inner:
        parts_by_name[joining.name_of(name, inner.parts["scale"])] = View(
            whole[0], whole[0].dtype, () if way.rule == "times" else (1,)
        )
    return parts_by_name


def _scale_of(together: Sequence[LazyTensor], rule: str, name: str) -> Tiled:
    """Return the scale of whole weights: of the largest number of each row, or part of one, the largest."""
    every = []
    for tensor in together:
        rows, columns = tensor.shape
        kernel = Largest("rows", min(columns, _MOST_COLUMNS), name)
        shape = rows, -(-columns // kernel.columns)
        every.append(Tiled((tensor,), _axes(largest_axes(kernel, 1)), kernel, DTYPES["float32"], shape, (0, 0)))
    kernel = Largest(rule, 0, name)
    return Tiled(tuple(every), _axes(largest_axes(kernel, len(every))), kernel, DTYPES["float32"], (1,), (0,))


def _axes(layout: Sequence[Sequence[tuple[int, int, int]]]) -> tuple[tuple[Axis, ...], ...]:
    return tuple(tuple(Axis(*axis) for axis in axes) for axes in layout)


def _of_powers(tensor: LazyTensor) -> Tiled | None:
    """Return the weight of MXFP4 that a tensor is, cast or not, a row of codes for a row of it; None if it is none."""
    while isinstance(tensor, (Tagged, Convert)):
        tensor = tensor.tensor
    if not isinstance(tensor, Tiled) or not isinstance(tensor.kernel, Dequantize):
        return None
    kernel, dims = tensor.kernel, len(tensor.shape)
    is_plain = kernel.codes == "e2m1" and kernel.roles == ("scale",) and not kernel.over and not any(tensor.starts)
    scales = tensor.parts[1]
    axes = (Axis(0), Axis(1, 4, 8)), (Axis(0), Axis(1, 1, 32))
    known = is_plain and dims == 2 and tensor.axes == axes and scales.dtype.name == "float8_e8m0fnu"
    return tensor if known and tensor.shape[1] % 32 == 0 else None


def _rescaled(name: str, tensor: LazyTensor, way: Way) -> dict[str, LazyTensor]:
    """Return the parts of NVFP4 of a weight of MXFP4: its codes, and other scales."""
    powers, inner = _of_powers(tensor), way.format.scale
    assert powers is not None
    assert inner is not None
    codes, scales = powers.parts
    codes = View(codes, DTYPES["uint8"], codes.shape)
    parts_by_name: dict[str, LazyTensor] = {joining.name_of(name, way.format.parts["codes"]): codes}
    rows, columns = powers.shape
    for what, part, shape, parts_ in (
        ("scales", inner.parts["codes"], (rows, columns // 16), (codes, scales, scales)),
        ("global", inner.parts["scale"], (1,), (scales,)),
    ):
        kernel = Rescale(what, name)
        dtype, starts = DTYPES[rescaled_dtype(kernel)], (0,) * len(shape)
        parts_by_name[joining.name_of(name, part)] = Tiled(
            parts_, _axes(rescaled_axes(kernel)), kernel, dtype, shape, starts
        )
    return parts_by_name
