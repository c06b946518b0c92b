"""The arithmetic of boxes and tiles of strided tensors, and of the moves of their bytes. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptconv.tensors.moves import BLOCK, GAP, Cut, File, Gather, Move, Runs
from ckptconv.tensors.strides import contiguous_strides, is_contiguous


class _Box(NamedTuple):
    """A block of a strided tensor.

    `target`: where the elements go (bytes). `origin`: where they begin (elements). `dims`: for each dimension the count
    and the stride (elements), in C order.
    """

    target: Runs
    origin: int
    dims: tuple[tuple[int, int], ...]


def bands(
    shape: tuple[int, ...], strides: tuple[int, ...], first: int, last: int, limit: int, item: int
) -> Iterator[_Box]:
    """Yield boxes of at most `limit` elements that cover elements `first` to `last`.

    The result of each is contiguous; they come in output order.
    """
    sizes = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

    def walk(dim: int, low: int, high: int, origin: int, done: int) -> Iterator[_Box]:
        """Yield the boxes of elements `low` to `high` of the sub-tensor of dimensions from `dim` on; the first goes to
        `done`.
        """
        if dim == len(shape):
            yield _Box(Runs(done * item, item), origin, ())
            return
        size, stride = sizes[dim], strides[dim]
        index, left_over = divmod(low, size)
        if left_over:
            end = min(size, high - index * size)
            yield from walk(dim + 1, left_over, end, origin + index * stride, done + index * size)
            index += 1
        stop, left_over = divmod(high, size)
        rows = limit // size
        while index < stop and rows:
            count = min(rows, stop - index)
            dims = ((count, stride), *zip(shape[dim + 1 :], strides[dim + 1 :], strict=True))
            target = Runs((done + index * size) * item, count * size * item)
            yield _Box(target, origin + index * stride, dims)
            index += count
        while index < stop:
            yield from walk(dim + 1, 0, size, origin + index * stride, done + index * size)
            index += 1
        if index == stop and left_over:
            yield from walk(dim + 1, 0, left_over, origin + stop * stride, done + stop * size)

    return walk(0, first, last, 0, 0)


class Tile(NamedTuple):
    """A block of a tensor: `target` is where its elements go (bytes); `starts` and `counts` are its first index and
    extent in each dimension."""

    target: Runs
    starts: tuple[int, ...]
    counts: tuple[int, ...]


# The cost of a written run, in read ones: a write allocates pages, and locks its file.
_WRITE = 4
# Bytes of a cache line; and how many a run may have before one less matters little.
_LINE, _FEW_LINES = 64, 8


def tiles(shape: tuple[int, ...], strides: tuple[int, ...], limit: int, item: int) -> Iterator[Tile]:
    """Yield blocks of at most `limit` elements that are long runs in both the file and the result, in file order."""
    by_source = sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: strides[dim])
    by_result = [dim for dim in reversed(range(len(shape))) if shape[dim] > 1]
    transposed = by_source[:1] != by_result[:1]
    if transposed:
        # A tile is made in pieces of a block. Those of larger tiles would take less than whole cache lines.
        limit = min(limit, shape[by_source[0]] * (BLOCK // _LINE))
    # Written runs are whole rows, or a power of two.
    blocks = dict.fromkeys(_block(shape, by_source, by_result, 1 << bits, limit) for bits in range(limit.bit_length()))
    tile = min(blocks, key=lambda tile: 1 / _run(shape, by_source, tile) + _WRITE / _run(shape, by_result, tile))
    if transposed:
        tile = _of_odd_lines(tile, by_source[0], shape, item)

    results = contiguous_strides(shape)
    outer = list(reversed(by_source))
    for corner in itertools.product(*(range(0, shape[dim], tile[dim]) for dim in outer)):
        starts = dict(zip(outer, corner, strict=True))
        counts = [min(tile[dim], shape[dim] - starts.get(dim, 0)) for dim in range(len(shape))]
        yield _tile(results, [starts.get(dim, 0) for dim in range(len(shape))], counts, item)


def _block(shape: tuple[int, ...], by_source: list[int], by_result: list[int], run: int, limit: int) -> tuple[int, ...]:
    """Return the extents of a block of at most `limit` elements. About `run` of them are contiguous in the result, and
    as many as fit are contiguous in the file."""
    tile = [1] * len(shape)
    for dims, most in ((by_result, run), (by_source, limit), (by_result, limit)):
        factor = most // math.prod(tile)
        for dim in dims:
            if factor < 2 or tile[dim] * factor < shape[dim]:
                tile[dim] *= max(factor, 1)
                break
            factor = factor * tile[dim] // shape[dim]
            tile[dim] = shape[dim]
    return tuple(tile)


def _of_odd_lines(tile: tuple[int, ...], dim: int, shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Return the extents of a block whose cut runs along `dim` have an odd number of cache lines, so that the runs that
    were read begin at any line of the cache."""
    lines = tile[dim] * item // _LINE
    if tile[dim] == shape[dim] or lines < _FEW_LINES:
        return tile
    return (*tile[:dim], (lines - 1 | 1) * _LINE // item, *tile[dim + 1 :])


def _run(shape: tuple[int, ...], dims: list[int], tile: tuple[int, ...]) -> int:
    """Return the number of elements of a block that are contiguous; `dims` are in the order of their strides."""
    run = 1
    for dim in dims:
        run *= tile[dim]
        if tile[dim] < shape[dim]:
            break
    return run


def cells(
    shape: tuple[int, ...],
    box: tuple[Sequence[int], Sequence[int]],
    origin: Sequence[int],
    sides: Sequence[int],
    limit: int,
    item: int,
) -> Iterator[Tile]:
    """Yield blocks that cover a box of a tensor of `shape`, given by its first index and its extent, in C order.

    The tensor's first element is the one of index `origin` of a larger one. Blocks begin and end where cells of `sides`
    of that do, and have at most `limit` elements if a cell does.
    """
    steps, first, extent = contiguous_strides(shape), *box
    grown = list(sides)
    for dim in reversed(range(len(shape))):
        room = max(limit // math.prod(grown), 1)
        grown[dim] = min(grown[dim] * room, -(-(origin[dim] + shape[dim]) // sides[dim]) * sides[dim])
        if grown[dim] < shape[dim]:
            break
    cuts = []
    for low, count, start, side in zip(first, extent, origin, grown, strict=True):
        low += start
        ends = [low, *range((low // side + 1) * side, low + count, side), low + count] if count else []
        cuts.append([(begin - start, end - begin) for begin, end in itertools.pairwise(ends)])
    for cell in itertools.product(*cuts):
        yield _tile(steps, [at for at, _ in cell], [count for _, count in cell], item)


def _tile(steps: Sequence[int], starts: Sequence[int], counts: Sequence[int], item: int) -> Tile:
    """Return the block of `counts` elements from index `starts` on of a tensor with these `steps` (elements)."""
    run = 1
    grid: list[tuple[int, int]] = []
    for step, count in zip(reversed(steps), reversed(counts), strict=True):
        if count > 1:
            if not grid and step == run:
                run *= count
            else:
                grid.append((count, step * item))
    at = sum(start * step for start, step in zip(starts, steps, strict=True))
    return Tile(Runs(at * item, run * item, tuple(reversed(grid))), tuple(starts), tuple(counts))


def boxes_of(tiles: Iterable[Tile], strides: tuple[int, ...]) -> Iterator[_Box]:
    """Yield tiles as boxes of a strided tensor."""
    for target, starts, counts in tiles:
        origin = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        yield _Box(target, origin, tuple(zip(counts, strides, strict=True)))


def gather(file: File, base: int, box: _Box, item: int, most: int) -> Move:
    """Return the move that makes `box`: the runs to read, and how to pick the elements from them.

    Gaps are read along with the runs only if that takes at most `most` bytes.
    """
    dims = [(count, stride * item) for count, stride in box.dims]
    axes = sorted((axis for axis, (count, stride) in enumerate(dims) if count > 1 and stride), key=lambda a: dims[a][1])
    for gap in (GAP, 0):
        run = item
        grid: list[int] = []
        packed: dict[int, int] = {}
        for axis in axes:
            count, stride = dims[axis]
            if not grid and stride - run <= gap:
                packed[axis] = stride
                run += (count - 1) * stride
            else:
                grid.append(axis)
        step = run
        for axis in grid:
            packed[axis] = step
            step *= dims[axis][0]
        # Reading across gaps pays only while the buffer stays small.
        if step <= most:
            break
    source = Runs(base + box.origin * item, run, tuple(dims[axis] for axis in reversed(grid)))
    shape = tuple(count for count, _ in dims)
    picked = tuple(packed.get(axis, 0) for axis in range(len(dims)))
    if step == box.target.nbytes and is_contiguous(shape, tuple(stride // item for stride in picked)):
        return Move(box.target, file, source)
    return Move(box.target, file, source, (Gather(shape, picked, item),))


def slices(gather: Gather, most: int) -> Iterator[tuple[int, Gather]]:
    """Yield gathers that make the result of `gather` piece by piece, each of at most `most` elements, and the byte of
    the source at which each begins."""
    shape, strides, item = gather
    inner = math.prod(shape[1:])
    if inner > most:
        for index in range(shape[0]):
            for at, piece in slices(Gather(shape[1:], strides[1:], item), most):
                yield index * strides[0] + at, piece
    elif inner:
        count = -(-shape[0] // (most // inner))
        for number in range(count):
            first, last = number * shape[0] // count, (number + 1) * shape[0] // count
            yield first * strides[0], Gather((last - first, *shape[1:]), strides, item)


def trim(move: Move, start: int, stop: int) -> Iterator[Move]:
    """Yield `move` without the bytes outside `start` to `stop`. Only an interval that cuts an element leaves such
    bytes.
    """
    offset, length, _ = move.target
    if start <= offset and move.target.stop <= stop:
        yield move
        return
    for done, at in enumerate(move.target.offsets()):
        low, high = max(start - at, 0), min(stop - at, length)
        if low < high:
            yield _piece(move, done * length + low, done * length + high, Runs(at + low, high - low))


def _piece(move: Move, low: int, high: int, target: Runs) -> Move:
    """Return a move that makes bytes `low` to `high` of the result of `move`, and puts them at `target`."""
    if not move.kernels:
        if isinstance(move.source, bytes):
            return Move(target, None, move.source[low:high])
        if isinstance(move.source, Runs) and not move.source.grid:
            return Move(target, move.file, Runs(move.source.offset + low, high - low))
    return Move(target, move.file, move.source, (*move.kernels, Cut(low, high)))


def row_runs(start: int, stop: int, row: int, limit: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the interval as (first row, last row, first byte, last byte): bands of full rows, or parts of one row."""
    while start < stop:
        first, low = divmod(start, row)
        count = min((stop - start) // row, max(limit // row, 1)) if low == 0 else 0
        if count:
            yield first, first + count, 0, row
            start += count * row
        else:
            high = min(row, low + stop - start)
            yield first, first + 1, low, high
            start += high - low


def spread(move: Move, width: int, row: int, begin: int) -> Iterator[Move]:
    """Yield `move` for a wider tensor.

    Its result are bytes of a tensor with rows of `width` bytes. In the wider tensor these are in rows of `row` bytes,
    from byte `begin` of each.
    """
    if width == row:
        yield move
        return
    whole = _spread_runs(move.target, width, row, begin)
    if whole is not None:
        yield move._replace(target=whole)
        return
    offset, length, grid = move.target
    if grid:
        for first, last in _regular(offset, grid[0], width):
            (_, distance), *inner = grid
            size = length * math.prod(count for count, _ in inner)
            outer = [(last - first, distance)] if last - first > 1 else []
            part = Runs(offset + first * distance, length, (*outer, *inner))
            yield from spread(_piece(move, first * size, last * size, part), width, row, begin)
        return
    done = 0
    end = offset + length
    while offset < end:
        low = offset % width
        rows = (end - offset) // width if low == 0 else 0
        length = rows * width or min(width - low, end - offset)
        target = _spread_runs(Runs(offset, length), width, row, begin)
        assert target is not None
        yield _piece(move, done, done + length, target)
        done += length
        offset += length


def _regular(offset: int, axis: tuple[int, int], width: int) -> Iterator[tuple[int, int]]:
    """Yield the indices of an axis whose first is at byte `offset`, in as few intervals as begin and end where rows of
    `width` bytes do; one by one if there are none."""
    count, distance = axis
    per_row, left_over = divmod(width, distance)
    if left_over or not per_row:
        yield from ((index, index + 1) for index in range(count))
        return
    first = min(-(-(width - offset % width) // distance) % per_row, count)
    last = first + (count - first) // per_row * per_row
    ends = sorted({0, first, last, count})
    if len(ends) == 2:
        ends = list(range(count + 1))
    yield from itertools.pairwise(ends)


def _spread_runs(runs: Runs, width: int, row: int, begin: int) -> Runs | None:
    """Return the places of `runs` in the wider tensor of `spread`; None if they are not at regular distances."""
    offset, length, grid = runs
    first, low = divmod(offset, width)
    if not low and length > width and not length % width:
        length, grid = width, (*grid, (length // width, width))
    # A run and its neighbours in its row end at byte `high` of the row; the other axes go from row to row.
    high = low + length
    wider = []
    for count, distance in reversed(grid):
        rows, left_over = divmod(distance, width)
        if not left_over:
            wider.append((count, rows * row))
            continue
        # An axis that goes on in the next row is two: the indices in a row, and the rows.
        inside = width // distance if high + (count - 1) * distance > width and not width % distance else count
        if count % inside or high + (inside - 1) * distance > width:
            return None
        high += (inside - 1) * distance
        wider.append((inside, distance))
        if inside < count:
            wider.append((count // inside, row))
    return Runs(first * row + begin + low, length, tuple(reversed(wider))) if high <= width else None
