"""Makes the parts of quantized weights of weights: the formats of `table`, read the other way. Pure."""

from __future__ import annotations

import struct

from ckptconv.features.quantized import joining
from ckptconv.features.quantized.computing import Dequantize, Quantize, Rescale
from ckptconv.features.quantized.quantize import MOST_SCALES, layout, made_dtype, rescaled_axes, rescaled_dtype
from ckptconv.features.quantized.table import Way
from ckptconv.tensors.computing import Axis, Tiled
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Convert, Inline, LazyTensor, Tagged, View


def unfit(tensor: LazyTensor, way: Way, exact: bool) -> str:
    """Return why a tensor cannot be quantized so; "" if it can. Only if it is to be `exact`, groups may be cut short:
    programs load whole ones."""
    dims, columns = len(tensor.shape), way.sizes["C"]
    if way.codes == "e2m1":
        found = _of_powers(tensor)
        if found and found.parts[1].numel > MOST_SCALES:
            return f"more than {MOST_SCALES >> 20} Mi scales"
        return "" if found else "no codes of MXFP4, row by row"
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
    if way.codes == "e2m1":
        return _rescaled(name, tensor, way)
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
    found, inner = _of_powers(tensor), way.format.scale
    assert found is not None
    assert inner is not None
    codes, scales = found.parts
    codes = View(codes, DTYPES["uint8"], codes.shape)
    made: dict[str, LazyTensor] = {joining.name_of(name, way.format.parts["codes"]): codes}
    rows, columns = found.shape
    for what, part, shape, parts_ in (
        ("scales", inner.parts["codes"], (rows, columns // 16), (codes, scales, scales)),
        ("global", inner.parts["scale"], (1,), (scales,)),
    ):
        kernel = Rescale(what, name)
        axes = tuple(tuple(Axis(*axis) for axis in each) for each in rescaled_axes(kernel))
        dtype, starts = DTYPES[rescaled_dtype(kernel)], (0,) * len(shape)
        made[joining.name_of(name, part)] = Tiled(parts_, axes, kernel, dtype, shape, starts)
    return made
