"""Makes tensors from arrays: joins their chunks as boxes. No element is read."""

from __future__ import annotations

import itertools
import math
import operator
import struct
from collections.abc import Container, Iterable, Iterator, Mapping

from ckptconv.errors import CorruptError, LimitError, UnsupportedError, damaged
from ckptconv.features.compressed.crc32c import crc32c
from ckptconv.features.compressed.packing import CRC32C, CRC32C_SIZE, FRAME, check_crc32c
from ckptconv.features.compressed.unpacking import content_of
from ckptconv.features.joining.chunks import ChunkTile, Shape, join
from ckptconv.features.joining.values import Files, Store, Value
from ckptconv.features.zarr import layouts
from ckptconv.features.zarr.layouts import Layout
from ckptconv.tensors.lazy import Convert, Inline, LazyTensor, Picked, Stored, Zeros
from ckptconv.tensors.moves import File, Packed, Swap
from ckptconv.text import quoted

# The most bytes of an array's description; the most bytes of a chunk in a node, which is unpacked at once.
_MOST_JSON, _SMALL = 1 << 20, 1 << 16
# The most pieces of an array: so many times those that exist, and these more.
_GROWTH, _ROOM = 64, 1 << 12
# The offset and the length of a chunk that is missing in a shard.
_ABSENT = (1 << 64) - 1


def described(store: Store) -> Iterator[str]:
    """Yield the names of the arrays that a store is known to describe."""
    for key in store.listed():
        array, _, last = key.rpartition("/")
        if last in layouts.DESCRIPTIONS:
            yield array


def opened(
    store: Store, files: Files, names: Iterable[str], *, has_all: bool
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return the arrays with these names, and how many chunks are there of those that lack some. If the store `has_all`
    chunks, also those of zeros, none may be missing.

    Raise CorruptError if an array is missing, or contradicts its description; UnsupportedError for one that is stored
    in an unknown way.
    """
    stored = {name: store.under(name) for name in names}
    layouts = _layouts(stored, files)
    values = {name: layout.by_start(stored[name]) for name, layout in layouts.items()}
    chunks = {name: {} if layout.shards else values[name] for name, layout in layouts.items()}
    shards = [(name, start) for name, layout in layouts.items() if layout.shards for start in values[name]]
    indices = files.contents([_index(layouts[name], values[name][start]) for name, start in shards])
    for (name, start), index in zip(shards, indices, strict=True):
        chunks[name].update(_inner(layouts[name], values[name][start], index, start))
    filled = []
    for name, layout in layouts.items():
        if len(chunks[name]) < (wanted := math.prod(map(len, _steps(layout)))):
            if has_all:
                raise _lacking(name, layout, chunks[name], values[name])
            filled.append(f"{len(chunks[name]):,} of {wanted:,} of {quoted(name)}")
    tensors = {name: _joined(layout, chunks[name]) for name, layout in layouts.items()}
    for file in {source.stored for tensor in tensors.values() for source in tensor.inputs()}:
        files.add(file)
    return tensors, filled


def _steps(layout: Layout) -> list[range]:
    """Return the first indices of an array's chunks, by axis."""
    return [range(0, extent, step) for extent, step in zip(layout.shape, layout.inner, strict=True)]


def _lacking(name: str, layout: Layout, chunks: Container[Shape], values: Container[Shape]) -> CorruptError:
    """Return the error for an array that lacks chunks of its own; `values` are those of its keys."""
    start = next(start for start in itertools.product(*_steps(layout)) if start not in chunks)
    cell = tuple(map(operator.floordiv, start, layout.chunk))
    key = f"{name}/{layout.named(cell)}"
    inside = f", in its shard {key}" if tuple(map(operator.mul, cell, layout.chunk)) in values else f": {key}"
    return damaged(f"{layout.where} lacks the chunk that begins at element {list(start)}{inside}.")


def _layouts(stored: Mapping[str, Mapping[str, Value]], files: Files) -> dict[str, Layout]:
    version_of: dict[str, str] = {}
    for name, values in stored.items():
        versions = [version for version in layouts.DESCRIPTIONS if version in values]
        if len(versions) != 1 or values[versions[0]].length > _MOST_JSON:
            has = "described twice, or in a file that is too long" if versions else "missing"
            raise CorruptError(f"{files.place}: the array {quoted(name)}, which its tree lists, is {has}.")
        version_of[name] = versions[0]
    contents = files.contents([stored[name][version] for name, version in version_of.items()])
    return {
        name: layouts.layout_of(data, f"{files.place}: the array {quoted(name)}", version)
        for (name, version), data in zip(version_of.items(), contents, strict=True)
    }


def _inside(layout: Layout) -> list[range]:
    return [range(size // part) for size, part in zip(layout.chunk, layout.inner, strict=True)]


def _index(layout: Layout, value: Value) -> Value:
    """Return the place of the index of a shard."""
    assert layout.shards is not None
    size = 16 * math.prod(map(len, _inside(layout))) + CRC32C_SIZE * layout.shards.is_summed
    if size > value.length:
        raise damaged(f"{value.file.path}: a shard of {layout.where} has {value.length} bytes, too few for its index.")
    return value.part(0 if layout.shards.at_start else value.length - size, size)


def _inner(layout: Layout, value: Value, index: bytes, start: Shape) -> Iterator[tuple[Shape, Value]]:
    """Yield the chunks that exist in a shard, each with its first index in the array. `start` is that of the shard, of
    which chunks may lie beyond the end of the array."""
    assert layout.shards is not None
    where = f"{value.file.path} (shard at byte {value.offset})"
    if layout.shards.is_summed:
        check_crc32c(f"{where}: its index", crc32c(index[:-CRC32C_SIZE]), index[-CRC32C_SIZE:])
    first, last = (len(index), value.length) if layout.shards.at_start else (0, value.length - len(index))
    taken = []
    for at, cell in enumerate(itertools.product(*_inside(layout))):
        offset, length = struct.unpack_from("<QQ", index, 16 * at)
        if offset == length == _ABSENT:
            continue
        if not first <= offset <= offset + length <= last:
            raise damaged(
                f"{where}: a chunk of {length} bytes at byte {offset} does not fit into its {value.length} bytes."
            )
        taken.append((offset, offset + length))
        begin = tuple(map(operator.add, start, map(operator.mul, cell, layout.inner)))
        if all(map(operator.lt, begin, layout.shape)):
            yield begin, value.part(offset, length)
    if any(stop > start for (_, stop), (start, _) in itertools.pairwise(sorted(taken))):
        raise damaged(f"{where}: its chunks overlap.")


def _joined(layout: Layout, stored: dict[Shape, Value]) -> LazyTensor:
    """Return an array, joined from its chunks by their first indices, out of `stored`. Missing chunks are filled."""
    steps = _steps(layout)
    cells = math.prod(map(len, steps))
    if len(stored) < cells and not layout.is_zero:
        raise UnsupportedError(f"{layout.where} lacks chunks, and its fill value for them is not zero.")
    if cells and not stored:
        return Zeros(layout.dtype, layout.shape)
    if cells > _GROWTH * len(stored) + _ROOM:
        raise LimitError(f"{layout.where} is divided into {cells} chunks, but contains only {len(stored)} of them.")
    tiles = []
    for start in itertools.product(*steps):
        box = tuple(map(min, layout.inner, map(operator.sub, layout.shape, start)))
        chunk = _chunk(layout, stored.pop(start), box) if start in stored else Zeros(layout.dtype, box)
        tiles.append(ChunkTile(start, chunk))
    return join(layout.dtype, layout.shape, tiles, lambda: layout.where)


def _chunk(layout: Layout, value: Value, box: Shape) -> LazyTensor:
    """Return the part `box`, from its beginning, of a stored chunk."""
    where = f"{value.file.path} (chunk at byte {value.offset})"
    file, offset, length, data = value
    if layout.methods and layout.nbytes > _SMALL:
        data = None
    for at, method in enumerate(layout.methods):
        size = length - CRC32C_SIZE * (method == CRC32C)
        if method == FRAME:  # the unpacked bytes may have checksums of their own
            size = layout.nbytes + CRC32C_SIZE * layout.methods[at + 1 :].count(CRC32C)
        if size < 0:
            raise damaged(f"{where} has {length} bytes, too few for a checksum.")
        file, offset, length = File(where, size, file.stamp, Packed(file, offset, length, None, method)), 0, size
        if data is not None:
            data = content_of(data, method, where, size)
            length = len(data)
    if length != layout.nbytes:
        raise damaged(f"{where} has {length} bytes, but a chunk of {layout.where} needs {layout.nbytes}.")
    tensor: LazyTensor = Stored(file, offset, layout.dtype, box, layout.strides)
    if data is not None:
        tensor = Picked(Inline(data, layout.dtype, layout.stored), 0, box, layout.strides)
    return Convert(tensor, Swap(layout.swapped), layout.dtype) if layout.swapped > 1 else tensor
