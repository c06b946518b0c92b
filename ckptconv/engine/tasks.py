"""Divides the work for an output file into tasks that do not depend on each other. Pure; knows no format.

An output file is made window by window. A window is an interval of the output no larger than a buffer. A tensor that
the file has in another order than the output (a transpose) is moved as tiles instead, each written where it belongs.
Tensors that are columns of the same rows are moved as blocks of rows: a few rows are read once, and each tensor's share
of them is written where it belongs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias, TypeGuard

from ckptconv.plan import Checked, Copied, Data, FilePlan, Literal, Trailer
from ckptconv.storage.coalesce import blocks
from ckptconv.storage.files import is_read_far
from ckptconv.storage.reading import Range
from ckptconv.tensors.lazy import Concat, Convert, LazyTensor, Stored, Tagged, View
from ckptconv.tensors.moves import BLOCK, Assembled, File, Move, Runs

# Tensors are cut at multiples of this many bytes, so that no element is cut.
ALIGNMENT = 64
# Windows end where rows do only if they have at least so many of them.
_FEW_ROWS = 4
# From a remote file, the runs of a strided tensor are fetched with the gaps between them if that is at most so many
# times the wanted bytes.
SPARSE = 4


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
    groups = _sharing_rows(file, unit) if positioned else []
    shared = {id(part) for group in groups for part, _ in group}
    dtype = shape = None
    new = tuple.__new__  # as Piece does
    for part in file.parts:
        if part.offset != at:
            raise ValueError(f"{file.name}: a part begins at {part.offset}, and the one before ends at {at}")
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
        yield from row_blocks(group, unit)
    if at != file.size:
        raise ValueError(f"{file.name}: its parts end at {at}, and its size is {file.size}")


# Parts of which many fit into a window.
_WHOLE = frozenset((Data, Literal))


def _has_all_of(piece: Piece, trailer: Trailer) -> bool:
    """Whether `trailer`, which comes after `piece`, depends on it alone."""
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
    """Whether a tile of `tensor` takes one buffer only, for the bytes read: it is put in its order piece by piece."""
    if isinstance(tensor, Concat):
        return all(map(_made_by_pieces, tensor.parts))
    if isinstance(tensor, (Tagged, View, Convert)):
        return _made_by_pieces(tensor.tensor)
    return isinstance(tensor, Stored)


_Shared: TypeAlias = "tuple[Data | Checked, StridedRows]"


def _sharing_rows(file: FilePlan, unit: int) -> list[list[_Shared]]:
    """Return groups of parts of `file` that are next to each other in the same rows and take most of each row."""
    strided = [
        (part, strided_part) for part in _not_dense(file) if (strided_part := strided_rows(part.tensor)) is not None
    ]
    groups: dict[object, list[list[_Shared]]] = {}
    for part, strided_part in sorted(strided, key=lambda pair: pair[1].offsets):
        known = groups.setdefault(strided_part.rows, [])
        if known and strided_part.shares_rows_of(known[-1][0][1]):
            known[-1].append((part, strided_part))
        else:
            known.append([(part, strided_part)])
    return [group for known in groups.values() for group in known if _worth_sharing(group, unit)]


def _not_dense(file: FilePlan) -> Iterator[Data | Checked]:
    """Yield the parts that are tensors, but for those that `is_dense`."""
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
            yield part


def is_dense(tensor: LazyTensor) -> TypeGuard[Stored]:
    """Whether `tensor` is contiguous bytes of a file: most tensors are, all of 200,000 may be, and they are handled
    fast.
    """
    return type(tensor) is Stored and tensor.contiguous


def _worth_sharing(group: list[_Shared], unit: int) -> bool:
    """Whether reading `group` at once costs less than reading each tensor, which reads across small gaps only."""
    _, (rows, _) = group[0]
    widest = max(distance for _, _, distance in rows)
    taken = sum(part.tensor.nbytes for part, _ in group)
    return len(group) > 1 and widest <= unit and 2 * taken >= sum(count * distance for _, count, distance in rows)


def row_blocks(group: list[_Shared], unit: int) -> Iterator[RowBlock]:
    """Yield `group` as blocks of as many rows as fit into `unit` bytes."""
    _, (rows, _) = group[0]
    count = sum(count for _, count, _ in rows)
    step = unit // max(distance for _, _, distance in rows)
    widths = [(part, part.tensor.nbytes // count) for part, _ in group]
    for first in range(0, count, step):
        last = min(first + step, count)
        yield RowBlock([Piece(part, first * width, last * width) for part, width in widths])


class Needs:
    """Gives the remote ranges that a task reads.

    For a scattered tensor, that is everything from its first byte to its last: nearly every task reads throughout it.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._whole: tuple[LazyTensor, list[Range]] | None = None

    def __call__(self, task: Task) -> Iterator[Range]:
        if isinstance(task, Tile):
            yield from self._around(task.part.tensor) or _read_by([task.move])
        elif isinstance(task, (Window, RowBlock)):
            for part, start, stop in task.pieces:
                if not isinstance(part, (Literal, Trailer)):
                    tensor = part.tensor
                    whole = self._around(tensor) if tensor.nbytes > self._unit and tensor.scattered else []
                    yield from whole or _read_by(tensor.moves(start, stop, "output", self._unit))

    def _around(self, tensor: LazyTensor) -> list[Range]:
        """Return the range from the first to the last byte of a tensor, in each of its files.

        Return no ranges if they have more than `SPARSE` times the tensor's bytes.
        """
        if self._whole is None or self._whole[0] is not tensor:
            ends: dict[File, tuple[int, int]] = {}
            for file, start, stop in _read_by(tensor.moves(0, tensor.nbytes, "source", BLOCK)):
                low, high = ends.get(file, (start, stop))
                ends[file] = min(low, start), max(high, stop)
            ranges = [Range(file, start, stop) for file, (start, stop) in ends.items()]
            if sum(stop - start for _, start, stop in ranges) > SPARSE * tensor.nbytes:
                ranges = []
            self._whole = tensor, ranges
        return self._whole[1]


def _read_by(moves: Iterable[Move]) -> Iterator[Range]:
    for move in moves:
        file, source = move.file, move.source
        if isinstance(source, Assembled):
            yield from _read_by(source.moves)
        if file is None or not isinstance(source, Runs) or not is_read_far(file):
            continue
        stop = source.stop
        if stop - source.offset <= SPARSE * source.nbytes:
            yield Range(file, source.offset, stop)
        else:
            yield from (Range(file, block.offset, block.stop) for block in blocks(source))


class StridedRows(NamedTuple):
    """The place of a tensor that takes the same bytes from each of several consecutive rows of equal length.

    `rows` are (file, number of rows, bytes from one to the next), one for each part of a joined tensor. `offsets` are
    the first byte of each part. Tensors with the same `rows` may share them.
    """

    rows: tuple[tuple[File, int, int], ...]
    offsets: tuple[int, ...]

    def shares_rows_of(self, first: StridedRows) -> bool:
        """Whether both are in the same rows, this one not before `first`."""
        return self.rows == first.rows and all(
            0 <= mine - theirs < distance
            for mine, theirs, (_, _, distance) in zip(self.offsets, first.offsets, self.rows, strict=True)
        )


def strided_rows(tensor: LazyTensor) -> StridedRows | None:
    """Return the strided rows of `tensor`, one index of its first dimension to a row.

    Return None for a tensor that is dense or in another order.
    """
    if isinstance(tensor, Tagged):
        return strided_rows(tensor.tensor)
    if isinstance(tensor, (View, Convert)):
        return strided_rows(tensor.tensor) if tensor.shape[:1] == tensor.tensor.shape[:1] else None
    if isinstance(tensor, Concat):
        parts = [rows_of_part for part in tensor.parts if (rows_of_part := strided_rows(part)) is not None]
        if not parts or len(parts) < len(tensor.parts):
            return None
        if tensor.dim:
            first = min(parts, key=lambda part: part.offsets)
            return first if all(part.shares_rows_of(first) for part in parts) else None
        rows, offsets = ([*itertools.chain(*column)] for column in zip(*parts, strict=True))
        return StridedRows(tuple(rows), tuple(offsets))
    if not isinstance(tensor, Stored) or not tensor.shape or not tensor.numel:
        return None
    item = tensor.dtype.itemsize
    distance = tensor.strides[0] * item
    width = item + sum((n - 1) * step for n, step in zip(tensor.shape[1:], tensor.strides[1:], strict=True)) * item
    if width >= distance:
        return None
    return StridedRows(((tensor.file, tensor.shape[0], distance),), (tensor.offset,))
