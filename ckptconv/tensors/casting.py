"""Casts of expressions: a computed tensor is rounded once, to the dtype that is requested last. Pure.

A dequantized weight is its product in float32. Programs that compute in the dtype of the scales (`Dequantize.between`)
round it to that one first, and so does a cast to another dtype of 16 bits; a cast to a wider dtype, and a computation
with the weight, take the product itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptconv.tensors.dtypes import DTYPES, SUMMED, DType
from ckptconv.tensors.lazy import Composed, Concat, Convert, Derived, LazyTensor, Narrow, Picked, Tagged, View
from ckptconv.tensors.moves import Cast


class Rounded(Convert):
    """A computed tensor, rounded to the dtype that it may be stored in: a later cast or computation goes back to the
    numbers before that. In a file it is like any other converted tensor."""

    __slots__ = ()
    fields = Convert.fields


def cast(tensor: LazyTensor, dtype: DType) -> LazyTensor:
    """Return `tensor` cast to `dtype`: each element is rounded once, from its value before it was `rounded`."""
    if tensor.dtype == dtype:
        return tensor
    if not any(isinstance(expression, Rounded) for expression in _made_of(tensor)):
        return Convert(tensor, Cast(tensor.dtype.name, dtype.name), dtype)
    if isinstance(tensor, Rounded):
        return rounded(tensor.tensor, dtype)
    return _within(tensor, lambda inner: cast(inner, dtype), dtype)


def rounded(tensor: LazyTensor, dtype: DType) -> LazyTensor:
    """Return a computed `tensor` in `dtype`, for now: `cast` and `unrounded` return to the computed numbers."""
    if dtype.itemsize > 2:
        tensor = _products(tensor)
    if tensor.dtype == dtype:
        return tensor
    kind = Convert if dtype.itemsize > tensor.dtype.itemsize else Rounded
    return kind(tensor, Cast(tensor.dtype.name, dtype.name), dtype)


def unrounded(tensor: LazyTensor) -> LazyTensor:
    """Return the numbers that `tensor` has before they are rounded, in a dtype that holds all of them."""
    dtypes = {
        inner.tensor.dtype if isinstance(inner, Rounded) and inner.tensor.dtype.name in SUMMED else inner.dtype
        for inner in _made_of(tensor)
    }
    if len(dtypes) == 1:
        return cast(tensor, dtypes.pop())
    return cast(tensor, DTYPES["float64" if DTYPES["float64"] in dtypes else "float32"])


def _made_of(tensor: LazyTensor) -> Iterator[LazyTensor]:
    """Yield the expressions whose elements are in `tensor` unchanged, in any order."""
    if isinstance(tensor, Concat):
        for part in tensor.parts:
            yield from _made_of(part)
    elif _is_view(tensor):
        yield from _made_of(tensor.tensor)  # type: ignore[attr-defined]
    else:
        yield tensor


def _is_view(tensor: LazyTensor) -> bool:
    return isinstance(tensor, (Narrow, Picked, Tagged, View)) and tensor.dtype == tensor.tensor.dtype


def _within(tensor: LazyTensor, change: Callable[[LazyTensor], LazyTensor], dtype: DType) -> LazyTensor:
    """Return a view or a joined tensor, with its inner tensors changed to elements of `dtype`."""
    if isinstance(tensor, Concat):
        return Concat(tuple(map(change, tensor.parts)), tensor.dim)
    assert isinstance(tensor, Derived)
    inner = change(tensor.tensor)
    return View(inner, dtype, tensor.shape) if isinstance(tensor, View) else tensor.replaced(tensor=inner)


def _products(tensor: LazyTensor) -> LazyTensor:
    """Return dequantized weights as products, not rounded to the dtype of their scales."""
    if isinstance(tensor, Concat) or _is_view(tensor):
        return _within(tensor, _products, tensor.dtype)
    from ckptconv.tensors.computing import Tiled  # few are

    kernel = tensor.tiling.unrounded(tensor.kernel) if isinstance(tensor, Tiled) else None
    return tensor if kernel is None or kernel is tensor.kernel else tensor.replaced(kernel=kernel)  # type: ignore[attr-defined]


def is_decoded(tensor: LazyTensor) -> bool:
    """Return whether a tensor, or a part of it, is decoded from codes."""
    from ckptconv.tensors.computing import Tiled

    if isinstance(tensor, Tiled) and tensor.tiling.decodes:
        return True
    inner = tensor.parts if isinstance(tensor, Composed) else (tensor.tensor,) if isinstance(tensor, Derived) else ()
    return any(map(is_decoded, inner))
