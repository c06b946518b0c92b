"""Divides the work for an output file into tasks that do not depend on each other. Pure; knows no format.

An output file is made window by window. A window is an interval of the output no larger than a buffer. A tensor that
the file has in another order than the output (a transpose) is moved as tiles instead, each written where it belongs.
Tensors that are columns of the same rows are moved as blocks of rows: a few rows are read once, and each tensor's share
of them is written where it belongs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias, TypeGuard

from ckptconv.plan import Checked, Copied, Data, FilePlan, Literal, Trailer
from ckptconv.tensors.lazy import Concat, Convert, LazyTensor, Partitioned, Stored, Tagged, View
from ckptconv.tensors.moves import Move

# Tensors are cut at multiples of this many bytes, so that no element is cut.
ALIGNMENT = 64
# Windows end where rows do only if they have at least so many of them.
_FEW_ROWS = 4


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a part."""

    part: Literal | Data | Trailer | Checked | Copied
    start: int
    stop: int


class Window(NamedTuple):
    """Bytes `start` to `stop` of the output file, and the pieces that make them up."""

    start: int
    stop: int
    pieces: list[Piece]


class Tile(NamedTuple):
    """A move whose result is written run by run, relative to the offset of `part` in the output file."""

    part: Data
    move: Move


class RowBlock(NamedTuple):
    """Pieces of several tensors that are made from the same bytes, which are read once."""

    pieces: list[Piece]


class Together(NamedTuple):
    """Windows of a tensor in compressed files. One worker takes them all, because decompression is sequential."""

    windows: list[Window]


Task: TypeAlias = Window | Tile | RowBlock | Together | Trailer


def tasks(file: FilePlan, unit: int, positioned: bool, tile: int = 0, several: bool = False) -> Iterator[Task]:
    """Yield the tasks that make `file`.

    Windows have at most `unit` bytes. Tiles have at most twice that, or `tile` if they are only transposed and
    converted. The trailer of one tensor that a window has whole is in it too, if there is room. Any other is a task, in
    its place, only if the writer is not `positioned`; otherwise it is left out.
    `several`: more than one worker takes the tasks.
    """
    pieces: list[Piece] = []
    start = at = size = 0
    groups = []
    if positioned and (apart := list(_not_dense(file))):
        from ckptconv.engine.rows import row_blocks, sharing_rows

        groups = sharing_rows(apart, unit)
    shared = {id(part) for group in groups for part, _ in group}
    dtype = shape = None
    new = tuple.__new__  # as Piece does
    for part in file.parts:
        if part.offset != at:
            raise ValueError(f"{file.name}: a part begins at {part.offset}, but the previous part ends at {at}")
        if type(part) is not Data:
            size, shape = part.nbytes, None
        elif part.tensor.shape is not shape or part.tensor.dtype is not dtype:
            # Many small tensors share these with the one before.
            size, shape, dtype = part.nbytes, part.tensor.shape, part.tensor.dtype
        at += size
        if size > 0 and at - start < unit and type(part) in _WHOLE and not (shared and id(part) in shared):
            pieces.append(new(Piece, (part, 0, size)))
            continue
        if isinstance(part, Trailer):
            if pieces and at - start <= unit and _has_all_of(pieces[-1], part):
                pieces.append(Piece(part, 0, size))
                continue
            if pieces:
                yield Window(start, part.offset, pieces)
            pieces, start = [], at
            if not positioned:
                yield part
            continue
        if id(part) in shared:
            if pieces:
                yield Window(start, part.offset, pieces)
            pieces, start = [], at
            continue
        if isinstance(part, Checked):
            nbytes = part.tensor.nbytes
            yield from (RowBlock([Piece(part, low, min(low + unit, nbytes))]) for low in range(0, nbytes, unit))
            continue
        if positioned and size > unit and isinstance(part, Data) and part.tensor.scattered:
            if pieces:
                yield Window(start, part.offset, pieces)
            from ckptconv.tensors.tiling import is_interleaved, joined_tiles

            if is_interleaved(part.tensor):
                moves = joined_tiles(part.tensor, max(tile // 3, unit))
            else:
                most = tile if tile and _made_by_pieces(part.tensor) else 2 * unit
                moves = part.tensor.moves(0, size, "source", most)
            yield from (Tile(part, move) for move in moves)
            pieces, start = [], at
            continue
        if several and size > unit and isinstance(part, Data) and any(source.packed for source in part.tensor.inputs()):
            if pieces:
                yield Window(start, part.offset, pieces)
            cuts = [*range(0, size, _whole_steps(part, unit)), size]
            yield Together(
                [
                    Window(part.offset + low, part.offset + high, [Piece(part, low, high)])
                    for low, high in itertools.pairwise(cuts)
                ]
            )
            pieces, start = [], at
            continue
        done, step = 0, _step(part, unit)
        while done < size:
            room = start + unit - part.offset - done
            # Cutting a small tensor costs two reads: begin a new window with it instead.
            take = size - done if size - done <= room else room // step * step if size > unit else 0
            if take:
                pieces.append(Piece(part, done, done + take))
                done += take
            if not take or part.offset + done - start >= unit:
                yield Window(start, part.offset + done, pieces)
                pieces, start = [], part.offset + done
    if pieces:
        yield Window(start, at, pieces)
    for group in groups:
        for block in row_blocks(group, unit):
            yield RowBlock([Piece(*piece) for piece in block])
    if at != file.size:
        raise ValueError(f"{file.name}: its parts end at {at}, but its size is {file.size}")


# Parts of which many fit into a window.
_WHOLE = frozenset((Data, Literal))


def _has_all_of(piece: Piece, trailer: Trailer) -> bool:
    """Return whether `trailer`, which comes after `piece`, depends on `piece` alone."""
    part, start, stop = piece
    is_whole = not start and part.offset + stop == trailer.offset
    return isinstance(part, Data) and part.name == trailer.of and is_whole


def _step(part: Literal | Data | Copied, unit: int) -> int:
    """Return the bytes at multiples of which a part is cut."""
    grain = 0 if isinstance(part, Literal) else part.tensor.grain
    return grain if 0 < grain <= unit // _FEW_ROWS else ALIGNMENT


def _whole_steps(part: Data, unit: int) -> int:
    """Return the most bytes of a large part that a window holds."""
    step = _step(part, unit)
    return unit // step * step


def _made_by_pieces(tensor: LazyTensor) -> bool:
    """Return whether a tile of `tensor` needs only the buffer of its bytes read: it is reordered piece by piece."""
    if isinstance(tensor, Concat):
        return all(map(_made_by_pieces, tensor.parts))
    if isinstance(tensor, (Tagged, View, Convert)):
        return _made_by_pieces(tensor.tensor)
    return isinstance(tensor, Stored)


def _not_dense(file: FilePlan) -> Iterator[Data | Checked]:
    """Yield the parts that are tensors, except those that are dense, and except pieces of ranks, which have no rows."""
    shape = strides = None
    for part in file.parts:
        if isinstance(part, (Data, Checked)):
            tensor = part.tensor
            if type(tensor) is Stored:
                if tensor.shape is shape and tensor.strides is strides:
                    continue
                if tensor.contiguous:
                    shape, strides = tensor.shape, tensor.strides
                    continue
            if type(tensor) is not Partitioned:
                yield part


def is_dense(tensor: LazyTensor) -> TypeGuard[Stored]:
    """Return whether `tensor` is one contiguous run of bytes in a file: most are, and take a fast path."""
    return type(tensor) is Stored and tensor.contiguous
