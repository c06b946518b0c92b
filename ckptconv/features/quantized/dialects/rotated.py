"""Undoes rotations of modules' inputs and outputs in their weights.

A module that multiplies its input by a matrix R, and that by its weight W, computes what a plain one with the weight
W·Rᵀ does; one that multiplies its output by U, what one with the weight Uᵀ·W and the bias b·U does. A smaller matrix is
for each block of neighbours. Products are sums in float64, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptconv.features.factors.kernels import with_product
from ckptconv.features.quantized.dialects.rotations import HADAMARD, INPUT, Rotation, linear_of, rotations
from ckptconv.features.quantized.parts import WEIGHT
from ckptconv.tensors.dtypes import DTYPES, SUMMED
from ckptconv.tensors.lazy import Concat, LazyTensor, Zeros, untagged
from ckptconv.tensors.slices import Span, Steps, sliced, strided, viewed


class Plain(NamedTuple):
    """A weight or a bias of a plain module, and the names of the matrices in it by place."""

    tensor: LazyTensor
    matrices: Mapping[str, str]


def undone(
    tensors: Mapping[str, LazyTensor], weights: Mapping[str, LazyTensor], told: Mapping[str, Any]
) -> tuple[dict[str, Plain], set[str]]:
    """Return the weights and biases of plain modules that replace those that rotate, by name, and the names of all
    matrices. `weights` are the quantized ones, and `told` is the configuration.

    Raise UnsupportedError for a rotation that no weight can undo, and if its modules or its matrix are not known.
    """
    groups = (told.get("transform_config") or {}).get("config_groups") or {}
    if not groups:
        return {}, set()
    online, gone = rotations(tensors, groups)
    plain = {name: Plain(tensor, {}) for name, tensor in {**tensors, **weights}.items() if name not in gone}
    linear = linear_of({name.removesuffix(WEIGHT) for name in weights}, told)
    keys = [name.split(".")[:-1] for name in plain]
    modules = linear.union(".".join(some[:depth]) for some in keys for depth in range(1, len(some) + 1))
    turned: dict[str, Plain] = {}
    for rotation in online:
        for module in rotation.modules(modules, linear):
            if rotation.place != INPUT and module not in linear:
                raise rotation.refused(
                    f"is for {module!r}, but the checkpoint does not specify that this module is linear"
                )
            turned |= _undone(rotation, module, {**plain, **turned})
    used = {name for one in turned.values() for name in one.matrices.values()}
    for rotation in online:
        if unused := sorted(rotation.matrices.keys() - used):
            raise rotation.refused(f"has the matrix {unused[0]!r}, which none of its modules uses")
    return turned, gone


def _undone(rotation: Rotation, module: str, plain: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the weight of a module, and its bias if that changes, by name, computed from those in `plain`."""
    place, is_orthogonal = rotation.place, rotation.settings["type"] in HADAMARD
    name, bias = f"{module}{WEIGHT}", f"{module}.bias"
    weight, before = plain.get(name, (Zeros(DTYPES["uint8"], ()), {}))
    if len(weight.shape) != 2 or weight.dtype.name not in SUMMED or place in before:
        raise rotation.refused(f"is for {module!r}, which has no matrix of floats or is rotated twice at this location")
    whole = weight.shape[1 if place == INPUT else 0]
    size = rotation.settings.get("head_dim") or whole
    matrices = {**before, place: rotation.matrix(module, size)}
    matrix, scale = untagged(rotation.matrices[matrices[place]]), size**-0.5 if is_orthogonal else 1.0
    turned = strided(matrix, (0, 0), (Steps(size, 1, 1), Steps(size, 0, 1)))
    if whole % size:
        raise rotation.refused(f"has blocks of {size} elements, but {module!r} has {whole}, which is not a multiple")
    if rotation.entry.get("inverse") and is_orthogonal:  # of others, the inverse is stored
        matrix, turned = turned, matrix
    if place == INPUT:
        return {name: Plain(_by_columns(weight, turned, scale), matrices)}
    spans = ((Span(at, 1, size), Span(0, 1, weight.shape[1])) for at in range(0, whole, size))
    pieces = [_product(turned, sliced(untagged(weight), rows), scale) for rows in spans]
    undone = {name: Plain(Concat(tuple(pieces), 0), matrices)}
    if bias in plain:
        undone[bias] = Plain(_by_columns(plain[bias].tensor, matrix, scale), matrices)
    return undone


def _by_columns(tensor: LazyTensor, matrix: LazyTensor, scale: float) -> LazyTensor:
    """Return each block of columns times a matrix, times `scale`."""
    size = matrix.shape[0]
    blocks = viewed(untagged(tensor), (tensor.numel // size, size))
    return viewed(_product(blocks, matrix, scale), tensor.shape)


def _product(left: LazyTensor, right: LazyTensor, scale: float) -> LazyTensor:
    nothing = Zeros(DTYPES["float32"], (left.shape[0], right.shape[1]))
    return with_product(nothing, left, right, scale=scale)
