"""Comparisons with what torch makes of a file, and with plain references.

`assert_same(one, other)` compares trees and forgives nothing: types, order, the bits of floats, what is shared with
what. It fails, naming the path, unless the trees could not be told apart by a program that holds them; it does not
recurse, so it compares trees of any depth, and cyclic ones. `same` compares what was read with what torch.load makes.
`evaluate` is a slow, plain reference for lazy tensors: what their moves make, worked out byte by byte with numpy.
"""

from __future__ import annotations

import collections
import functools
import os
import struct
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import of_features
from torch import nn

from ckptconv.pickles.nodes import Composite, Global, NumpyArray, NumpyScalar, Opaque, Size, TorchConstant
from ckptconv.tensors.computing import Bits, Join, Tile
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.kernels import apply
from ckptconv.tensors.lazy import LazyTensor, Tagged, TensorFacts, same_bytes, untagged
from ckptconv.tensors.moves import BLOCK, Assembled, Conjugate, Cut, File, Gather, Move, Negate, Order, Swap
from ckptconv.tensors.strides import contiguous_strides, is_contiguous

MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
SEQUENCES = (list, tuple, deque, Size, Global, TorchConstant, NumpyScalar)
# Whether these are one object or two equal ones makes no difference to a program that is not looking for it.
VALUES = (str, bytes, int, bool, float, complex, type(None), type(...), range)


def assert_same(one: Any, other: Any) -> None:
    """Fail unless two trees are the same in every respect."""
    pairing = _Pairing()
    stack: list[tuple[Any, Any, str]] = [(one, other, "")]
    while stack:
        left, right, path = stack.pop()
        lazy = isinstance(left, LazyTensor) and isinstance(right, LazyTensor)
        assert lazy or type(left) is type(right), f"{path}: {type(left)} against {type(right)}"
        if isinstance(left, VALUES):
            assert _bits(left) == _bits(right), f"{path}: {left!r} against {right!r}"
            continue
        if pairing.known(left, right, path):
            continue
        if is_tensor(left):
            stack.append((*pairing.tensors(left, right, path), f"{path}.<attributes>"))
        else:
            stack.extend(reversed(list(_parts(left, right, path))))
    pairing.check_sharing()


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, LazyTensor) or (torch is not None and isinstance(value, torch.Tensor))


def text(value: Any) -> str:
    """What an element of a set looks like, in which order its own elements may come."""
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(text, value)))}}}"
    if type(value) is tuple:
        return f"({', '.join(map(text, value))})"
    return repr(value)


def _bits(value: Any) -> Any:
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, complex):
        return struct.pack(">dd", value.real, value.imag)
    if isinstance(value, range):
        return value.start, value.stop, value.step
    return value


def _parts(left: Any, right: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """Pairs of what the two consist of, in order."""
    kind = type(left)
    module = kind.__module__.partition(".")[0]
    if kind in MAPPINGS:
        assert len(left) == len(right), f"{path}: {len(left)} entries against {len(right)}"
        for (left_key, left_value), (right_key, right_value) in zip(left.items(), right.items(), strict=True):
            yield left_key, right_key, f"{path}.<key {left_key!r:.50}>"
            yield left_value, right_value, f"{path}.{left_key!r:.50}"
        if kind in (OrderedDict, Counter):
            yield vars(left), vars(right), f"{path}.<attributes>"
        if kind is defaultdict:
            assert left.default_factory is right.default_factory, path
    elif kind in SEQUENCES or (module == "torch" and issubclass(kind, tuple)):
        assert len(left) == len(right), f"{path}: {len(left)} elements against {len(right)}"
        if kind is deque:
            yield left.maxlen, right.maxlen, f"{path}.maxlen"
        for index, (left_item, right_item) in enumerate(zip(left, right, strict=True)):
            yield left_item, right_item, f"{path}[{index}]"
    elif kind in (set, frozenset):
        assert len(left) == len(right), f"{path}: {len(left)} elements against {len(right)}"
        yield from (
            (a, b, f"{path}.<element>") for a, b in zip(sorted(left, key=text), sorted(right, key=text), strict=True)
        )
    elif kind is bytearray:
        assert left == right, path
    elif kind is slice:
        yield (left.start, left.stop, left.step), (right.start, right.stop, right.step), path
    elif kind is Opaque:
        for name in ("cls", "args", "kwargs", "call", "state", "appended", "items"):
            yield getattr(left, name), getattr(right, name), f"{path}.{name}"
    elif kind is Composite:
        yield left.kind, right.kind, f"{path}.kind"
        yield left.parts, right.parts, path
    elif kind is NumpyArray:
        for name in ("dtype", "shape", "order", "data"):
            yield getattr(left, name), getattr(right, name), f"{path}.{name}"
    elif module == "numpy":
        assert left.dtype == right.dtype, path
        assert left.shape == right.shape, path
        assert left.tobytes() == right.tobytes(), path
        assert (left.flags.c_contiguous, left.flags.f_contiguous) == (
            right.flags.c_contiguous,
            right.flags.f_contiguous,
        )
    else:
        assert left == right, f"{path}: {left!r} against {right!r}"


class _Pairing:
    """Which object of one tree is which of the other: one for one, or something is shared in one tree only."""

    def __init__(self) -> None:
        self.forwards: dict[int, tuple[Any, Any]] = {}
        self.backwards: dict[int, int] = {}
        self.views: list[tuple[TensorFacts, TensorFacts, tuple[int, ...], str]] = []

    def known(self, left: Any, right: Any, path: str) -> bool:
        """Whether the two have been met before, as partners of one another."""
        if isinstance(left, (Global, TorchConstant, NumpyScalar)) or (
            isinstance(left, (tuple, frozenset)) and not left
        ):
            return False
        module = type(left).__module__.partition(".")[0]
        if module in ("torch", "numpy") and not is_tensor(left) and not getattr(left, "shape", ()):
            return False  # constants, sizes, and scalars
        if id(left) in self.forwards:
            assert self.forwards[id(left)][1] is right, f"{path}: shared in the first tree, not in the second"
            return True
        assert id(right) not in self.backwards, f"{path}: shared in the second tree, not in the first"
        self.forwards[id(left)] = (left, right)
        self.backwards[id(right)] = id(left)
        return False

    def tensors(self, left: Any, right: Any, path: str) -> tuple[Any, Any]:
        """Compare two tensors in all but what they share; their attributes are returned."""
        if isinstance(left, LazyTensor) or isinstance(right, LazyTensor):
            left_facts, right_facts = _lazy_facts(left), _lazy_facts(right)
            assert untagged(left) == untagged(right), f"{path}: {left!r} against {right!r}"
        else:
            left_facts, right_facts = _torch_facts(left), _torch_facts(right)
            assert left.dtype is right.dtype, path
            assert left.device == right.device, path
            assert left.layout is right.layout, path
            assert _data(left) == _data(right), f"{path}: different elements"
        assert _shape(left) == _shape(right), path
        assert left_facts.kind == right_facts.kind, f"{path}: {left_facts.kind} against {right_facts.kind}"
        assert left_facts.requires_grad == right_facts.requires_grad, path
        self.views.append((left_facts, right_facts, _shape(left), path))
        return left_facts.attributes, right_facts.attributes

    def check_sharing(self) -> None:
        """Tensors that shared a storage share one, with the same strides, and as far from one another."""
        groups: dict[Any, list[tuple[TensorFacts, TensorFacts, tuple[int, ...], str]]] = {}
        others: dict[Any, set[Any]] = {}
        for view in self.views:
            alone = ("alone", view[3])
            if view[0].storage is not None:
                groups.setdefault(view[0].storage, []).append(view)
            if view[1].storage is not None:
                others.setdefault(view[1].storage, set()).add(view[0].storage or alone)
        for group in groups.values():
            first = group[0]
            if len(group) == 1:
                if _is_dense(first[2], first[0].strides):
                    assert _significant(first[2], first[0].strides) == _significant(first[2], first[1].strides), first[
                        3
                    ]
                continue
            for left, right, shape, path in group:
                assert right.storage is not None, f"{path}: no longer shares its storage"
                assert right.storage == first[1].storage, f"{path}: no longer shares its storage"
                assert _significant(shape, left.strides) == _significant(shape, right.strides), f"{path}: strides"
                before = left.storage_offset - first[0].storage_offset
                after = right.storage_offset - first[1].storage_offset
                assert before == after, f"{path}: another part of the storage"
        for sharing in others.values():
            assert len(sharing) == 1, f"share a storage now, and did not before: {sharing}"


def _significant(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    return [stride for extent, stride in zip(shape, strides or contiguous_strides(shape), strict=True) if extent > 1]


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    dims = sorted(zip(strides or contiguous_strides(shape), shape, strict=True), reverse=True)
    return is_contiguous(tuple(extent for _, extent in dims), tuple(stride for stride, _ in dims))


def _lazy_facts(tensor: Any) -> TensorFacts:
    facts = tensor.facts if isinstance(tensor, Tagged) else TensorFacts()
    if facts.storage is None and not facts.strides:
        key = same_bytes(tensor)
        return TensorFacts(facts.kind, facts.requires_grad, facts.attributes, None if key is None else ("bytes", key))
    return facts if tensor.numel else TensorFacts(facts.kind, facts.requires_grad, facts.attributes)


def _torch_facts(tensor: Any) -> TensorFacts:
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    made_of_several = tensor.layout is not sys.modules["torch"].strided or tensor.is_quantized or tensor.is_nested
    if made_of_several or tensor.is_meta or not tensor.numel():
        return TensorFacts(kind, tensor.requires_grad, vars(tensor))
    return TensorFacts(
        kind,
        tensor.requires_grad,
        vars(tensor),
        tensor.untyped_storage().data_ptr(),
        tensor.untyped_storage().nbytes(),
        tensor.storage_offset(),
        tuple(tensor.stride()),
    )


def _shape(tensor: Any) -> tuple[int, ...]:
    if not isinstance(tensor, LazyTensor) and tensor.is_nested:
        return (tensor.size(0),)
    return tuple(tensor.shape)


def _data(tensor: Any) -> Any:
    """All the bytes of a tensor of torch, whatever they mean."""
    torch = sys.modules["torch"]
    if tensor.is_meta:
        return tuple(tensor.stride())
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return _data(tensor._indices()), _data(tensor._values()), tensor.is_coalesced()
    if tensor.is_nested:
        offsets = tensor._nested_tensor_storage_offsets()
        return _data(tensor.values()), tensor._nested_tensor_size().tolist(), offsets.tolist()
    if tensor.layout is not torch.strided:
        return _data(tensor.values()), repr(tensor)
    if tensor.is_quantized:
        return _data(tensor.int_repr()), repr(tensor)
    tensor = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def bits(tensor: torch.Tensor) -> bytes:
    # A tensor may count as contiguous and still have a stride of 0, which `view` does not like.
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor.detach())
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same(ours: Any, theirs: Any, path: str = "") -> None:
    """Assert that what we read is what torch.load makes."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, Tagged), path
        assert f"torch.{ours.dtype}" == str(theirs.dtype), path
        assert ours.shape == theirs.shape, path
        assert evaluate(ours) == bits(theirs), path
        # Cut into pieces of 64 bytes, or what is large into some thousand.
        limit = max(64, 1 << (ours.nbytes >> 11).bit_length())
        assert evaluate(ours, order="source", limit=limit) == bits(theirs), path
        facts = ours.facts
        assert facts.strides == theirs.stride(), path
        assert facts.storage_offset == theirs.storage_offset(), path
        assert facts.storage_nbytes == theirs.untyped_storage().nbytes(), path
        assert facts.requires_grad == theirs.requires_grad, path
        assert (facts.kind == "parameter") == isinstance(theirs, nn.Parameter), path
        attributes = {k: v for k, v in vars(theirs).items() if not k.startswith("_backward")} or None
        same(facts.attributes, attributes, path + ".attributes")
    elif isinstance(theirs, dict):
        assert type(ours) is type(theirs), path
        assert list(ours) == list(theirs), path
        for key, value in theirs.items():
            same(ours[key], value, f"{path}/{key}")
        if getattr(theirs, "__dict__", None):
            same(vars(ours), vars(theirs), path + ".__dict__")
    elif isinstance(theirs, (list, tuple, collections.deque)):
        assert type(ours) is (Size if type(theirs) is torch.Size else type(theirs)), path
        assert len(ours) == len(theirs), path
        for index, value in enumerate(theirs):
            same(ours[index], value, f"{path}[{index}]")
    elif isinstance(theirs, np.ndarray):
        assert type(ours) is NumpyArray, path
        back = np.frombuffer(ours.data, ours.dtype).reshape(ours.shape, order=ours.order)
        # numpy turns arrays of the other byte order when it reads them, at some protocols.
        assert back.dtype.newbyteorder("=") == theirs.dtype.newbyteorder("="), path
        assert back.astype(theirs.dtype).tobytes() == theirs.tobytes(), path
    elif isinstance(theirs, np.generic):
        assert type(ours) is NumpyScalar, path
        assert ours.dtype == theirs.dtype.str, path
        assert ours.data == theirs.tobytes(), path
    elif isinstance(theirs, (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)):
        assert type(ours) is TorchConstant, path
        assert f"torch.{ours.name}" == str(theirs), path
    elif isinstance(theirs, torch.device):
        assert ours == TorchConstant("device", str(theirs)), path
    else:
        assert type(ours) is type(theirs), path
        assert repr(ours) == repr(theirs), path


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of random bits."""
    count = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return (raw % 2).view(dtype).reshape(shape) if dtype is torch.bool else raw.view(dtype).reshape(shape)


# All of torch's that a tensor can be saved in; those of odd widths exist by name only.
SAVABLE = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and str(d).removeprefix("torch.") in DTYPES
     and not str(d).startswith("torch.q")}, key=str
)  # fmt: skip


class Attack:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch '{self.canary}'",)


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
            data = _of_features()[type(kernel)](kernel, data)
    return data


@functools.cache
def _of_features() -> dict[type[Any], Callable[[Any, np.ndarray], np.ndarray]]:
    """What kernels of features make of bytes, byte by byte."""
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
