"""A slow, plain reference for lazy tensors: what their moves make, worked out byte by byte with numpy."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from cells import of_features

from ckptconv.tensors.computing import Bits, Join, Tile
from ckptconv.tensors.kernels import apply
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import BLOCK, Assembled, Conjugate, Cut, File, Gather, Move, Negate, Order, Swap


def read(move: Move) -> np.ndarray:
    """The source bytes of a move, packed."""
    if isinstance(move.source, bytes):
        return np.frombuffer(move.source, "u1")
    if isinstance(move.source, Assembled):
        out, covered = np.zeros(move.source.nbytes, "u1"), np.zeros(move.source.nbytes, "i4")
        for inner in move.source.moves:
            put(out, covered, inner, result(inner, read(inner)))
        # The inputs of a tile begin at multiples of 16 bytes.
        assert (covered == 1).all() or ((covered <= 1).all() and isinstance(move.kernels[0], Tile))
        return out
    if move.file.packed:
        content = inflated(move.file)
        return np.frombuffer(b"".join(content[at : at + move.source.length] for at in move.source.offsets()), "u1")
    with open(move.file.path, "rb") as file:
        runs = []
        for offset in move.source.offsets():
            file.seek(offset)
            runs.append(file.read(move.source.length))
    return np.frombuffer(b"".join(runs), "u1")


@functools.lru_cache(maxsize=4)
def inflated(file: File) -> bytes:
    """The content of a file that is deflated inside another."""
    with open(file.packed.file.path, "rb") as archive:
        archive.seek(file.packed.offset)
        return zlib.decompress(archive.read(file.packed.nbytes), -zlib.MAX_WBITS)


def result(move: Move, data: np.ndarray) -> np.ndarray:
    """What the kernels of a move make of its source; casts are tested elsewhere, and so is what a tile computes."""
    for kernel in move.kernels:
        if isinstance(kernel, Gather):
            strides = (*kernel.strides, 1)
            picked = np.lib.stride_tricks.as_strided(data, (*kernel.shape, kernel.itemsize), strides)
            data = np.ascontiguousarray(picked).reshape(-1)
        elif isinstance(kernel, Cut):
            data = data[kernel.start : kernel.stop]
        elif isinstance(kernel, Swap):
            data = np.ascontiguousarray(data.reshape(-1, kernel.itemsize)[:, ::-1]).reshape(-1)
        elif isinstance(kernel, Negate):
            data = (-data.view({"float32": "f4", "float64": "f8", "complex64": "c8"}[kernel.dtype])).view("u1")
        elif isinstance(kernel, Conjugate):
            data = data.view({"complex64": "c8", "complex128": "c16"}[kernel.dtype]).conj().view("u1")
        elif isinstance(kernel, Bits):
            numbers = [number >> kernel.shift & (1 << kernel.width) - 1 for number in unsigned(data, kernel.itemsize)]
            data = packed(numbers, kernel.result)
        elif isinstance(kernel, Join):
            count = len(data) // sum(size for size, _, _ in kernel.kinds)
            joined, at = [0] * count, 0
            for size, shift, width in kernel.kinds:
                kind = unsigned(data[at : at + count * size], size)
                assert all(number < 1 << width for number in kind)
                joined = [whole | number << shift for whole, number in zip(joined, kind, strict=True)]
                at += count * size
            data = packed(joined, kernel.result)
        elif isinstance(kernel, Tile):
            data = np.frombuffer(apply((kernel,), data.data)[0], "u1")
        else:
            data = of_features_kernels()[type(kernel)](kernel, data)
    return data


@functools.cache
def of_features_kernels() -> dict[type[Any], Callable[[Any, np.ndarray], np.ndarray]]:
    return {kernel: made for each in of_features("EVALUATED") for kernel, made in each.items()}


def unsigned(data: np.ndarray, size: int) -> list[int]:
    """Little-endian integers of `size` bytes."""
    content = data.tobytes()
    return [int.from_bytes(content[at : at + size], "little") for at in range(0, len(content), size)]


def packed(numbers: list[int], size: int) -> np.ndarray:
    return np.frombuffer(b"".join(number.to_bytes(size, "little") for number in numbers), "u1")


def put(out: np.ndarray, covered: np.ndarray, move: Move, data: np.ndarray) -> None:
    """Put the bytes a move made where they belong, and count them."""
    length = move.target.length
    assert len(data) == move.target.nbytes
    for index, offset in enumerate(move.target.offsets()):
        out[offset : offset + length] = data[index * length : (index + 1) * length]
        covered[offset : offset + length] += 1


def evaluate(
    tensor: LazyTensor,
    start: int = 0,
    stop: int | None = None,
    order: Order = "output",
    limit: int = BLOCK,
    moves: Iterable[Move] | None = None,
) -> bytes:
    """Bytes `start` to `stop` of a tensor, from its moves; asserts that these make every byte of it exactly once."""
    stop = tensor.nbytes if stop is None else stop
    out, covered = np.zeros(tensor.nbytes, "u1"), np.zeros(tensor.nbytes, "i4")
    for move in tensor.moves(start, stop, order, limit):
        put(out, covered, move, result(move, read(move)))
    assert (covered[start:stop] == 1).all()
    assert not covered[:start].any()
    assert not covered[stop:].any()
    return out[start:stop].tobytes()
