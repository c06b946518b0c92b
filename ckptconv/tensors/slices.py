"""Slices of lazy tensors, as lazy tensors: which bytes of which files they need. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.geometry import bands, contiguous_strides, gather, trim
from ckptconv.tensors.lazy import (
    Concat,
    Convert,
    Derived,
    Joined,
    LazyTensor,
    Narrow,
    Partitioned,
    Stored,
    Tagged,
    View,
    Zeros,
)
from ckptconv.tensors.moves import BLOCK, GAP, Assembled, File, Move, Order, Runs

# Bytes of one move of a `Picked` tensor at most: it may consist of as many runs as elements.
_PICKED_AT_ONCE = 1 << 16
_INNER = File("", 0)


class Span(NamedTuple):
    """The indices of one dimension: `length` of them from `start`, each `step` (at least 1) after the one before."""

    start: int
    step: int
    length: int


@dataclass(frozen=True, slots=True)
class Picked(Derived):
    """The elements of `tensor` at `spans`, one span for each dimension."""

    tensor: LazyTensor
    spans: tuple[Span, ...]

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(span.length for span in self.spans)

    @property
    def scattered(self) -> bool:
        return False

    def moves(self, start: int, stop: int, order: Order = "output", limit: int = BLOCK) -> Iterator[Move]:
        if start >= stop:
            return
        # The elements of the tensor as they lie in its own bytes, in C order, are the file that a strided tensor is in.
        item, limit = self.dtype.itemsize, min(limit, _PICKED_AT_ONCE)
        within = contiguous_strides(self.tensor.shape)
        origin = sum(span.start * stride for span, stride in zip(self.spans, within, strict=True))
        strides = tuple(span.step * stride for span, stride in zip(self.spans, within, strict=True))
        # Elements with small gaps between them are read together with these: make boxes of fewer.
        most = max(int(limit / _density(self.shape, strides, item)) // item, 1)
        for box in bands(self.shape, strides, start // item, -(-stop // item), most, item):
            for move in self._made(gather(_INNER, origin * item, box, item, 2 * limit), limit):
                yield from trim(move, start, stop)

    def _made(self, move: Move, limit: int) -> Iterator[Move]:
        """Yield `move`, which reads bytes of the inner tensor, as moves that read files."""
        assert isinstance(move.source, Runs)
        parts = self._read(move.source, limit)
        if move.kernels:
            yield Move(move.target, None, Assembled(tuple(parts), move.source.nbytes), move.kernels)
        else:
            for part in parts:
                yield part._replace(target=part.target.shifted(move.target.offset))

    def _read(self, source: Runs, limit: int) -> Iterator[Move]:
        """Yield the moves that make the runs `source` of the inner tensor, packed one after the other."""
        for number, offset in enumerate(source.offsets()):
            distance = number * source.length - offset
            for move in self.tensor.moves(offset, offset + source.length, "output", limit):
                yield move._replace(target=move.target.shifted(distance))


def _density(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> float:
    """Return the bytes from the first to the last of the elements that have small gaps between them, by their own."""
    run, count = item, 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1:
            if stride * item - run > GAP:
                break
            run += (length - 1) * stride * item
            count *= length
    return run / (count * item)


def sliced(tensor: LazyTensor, spans: Sequence[Span]) -> LazyTensor:
    """Return the elements of `tensor` at `spans`, one for each dimension.

    What is made of stored elements is made of slices of these. Only what cuts a tensor without regard to its shape, as
    the partitions of ZeRO-3 do, becomes `Picked`.
    """
    spans = tuple(spans)
    if all(span == (0, 1, extent) for span, extent in zip(spans, tensor.shape, strict=True)):
        return tensor
    shape = tuple(span.length for span in spans)
    if isinstance(tensor, Zeros) or not math.prod(shape):
        return Zeros(tensor.dtype, shape)
    stored = as_stored(tensor) or _as_piece(tensor, spans)
    if stored is not None:
        offset = sum(span.start * stride for span, stride in zip(spans, stored.strides, strict=True))
        strides = tuple(span.step * stride for span, stride in zip(spans, stored.strides, strict=True))
        return replace(stored, offset=stored.offset + offset * stored.dtype.itemsize, shape=shape, strides=strides)
    if isinstance(tensor, Tagged):
        return sliced(tensor.tensor, spans)
    if isinstance(tensor, Convert):
        return replace(tensor, tensor=sliced(tensor.tensor, spans))
    if isinstance(tensor, Joined):
        return replace(tensor, parts=tuple(sliced(part, spans) for part in tensor.parts))
    if isinstance(tensor, Narrow):
        span = spans[tensor.dim]
        moved = span._replace(start=span.start + tensor.start)
        return sliced(tensor.tensor, (*spans[: tensor.dim], moved, *spans[tensor.dim + 1 :]))
    if isinstance(tensor, Concat):
        return _of_parts(tensor, spans)
    if isinstance(tensor, View) and tensor.shape == tensor.tensor.shape:
        return View(sliced(tensor.tensor, spans), tensor.dtype, shape)
    return Picked(tensor, spans)


def _of_parts(tensor: Concat, spans: tuple[Span, ...]) -> LazyTensor:
    """Return a slice of a joined tensor: the slices of those parts that it has anything of."""
    start, step, count = spans[tensor.dim]
    parts: list[LazyTensor] = []
    begin = done = 0
    for part in tensor.parts:
        end = begin + part.shape[tensor.dim]
        first = start + done * step
        taken = min(-(-(end - first) // step), count - done) if first < end else 0
        if taken:
            span = Span(first - begin, step, taken)
            parts.append(sliced(part, (*spans[: tensor.dim], span, *spans[tensor.dim + 1 :])))
        done, begin = done + taken, end
    return parts[0] if len(parts) == 1 else Concat(tuple(parts), tensor.dim)


def as_stored(tensor: LazyTensor) -> Stored | None:
    """Return `tensor` as elements stored in one file; None if it is anything else."""
    if isinstance(tensor, Tagged):
        return as_stored(tensor.tensor)
    if isinstance(tensor, View):
        inner = as_stored(tensor.tensor)
        if inner is None:
            return None
        if tensor.shape == (*inner.shape, 2) and inner.dtype.kind == "c":
            strides = (*(2 * stride for stride in inner.strides), 1)
        elif inner.contiguous:
            strides = contiguous_strides(tensor.shape)
        elif tensor.shape == inner.shape and tensor.dtype.itemsize == inner.dtype.itemsize:
            strides = inner.strides
        else:
            return None
        return Stored(inner.file, inner.offset, tensor.dtype, tensor.shape, strides)
    if isinstance(tensor, Partitioned):
        return _as_piece(tensor, tuple(Span(0, 1, extent) for extent in tensor.shape))
    return tensor if isinstance(tensor, Stored) else None


def _as_piece(tensor: LazyTensor, spans: tuple[Span, ...]) -> Stored | None:
    """Return all of `tensor` as if one rank's piece of it went on, if that piece has all of `spans`; else None."""
    if not isinstance(tensor, Partitioned) or not tensor.numel:
        return None
    strides = contiguous_strides(tensor.shape)
    first = sum(span.start * stride for span, stride in zip(spans, strides, strict=True))
    last = first + sum((span.length - 1) * span.step * stride for span, stride in zip(spans, strides, strict=True))
    rank = first // tensor.piece
    if last // tensor.piece != rank:
        return None
    before = tensor.offset - rank * tensor.piece * tensor.dtype.itemsize
    return Stored(tensor.files[rank], tensor.bases[rank] + before, tensor.dtype, tensor.shape, strides)


def extent(stored: Stored) -> int:
    """Return the number of bytes from the first element of `stored` to the end of its last; 0 if it has none."""
    if not stored.numel:
        return 0
    steps = ((count - 1) * stride for count, stride in zip(stored.shape, stored.strides, strict=True))
    return (sum(steps) + 1) * stored.dtype.itemsize
