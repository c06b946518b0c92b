"""A comparison of trees that forgives nothing: types, order, the bits of floats, what is shared with what.

`assert_same(one, other)` fails, naming the path, unless the trees could not be told apart by a program that holds them.
It does not recurse, so it compares trees of any depth, and cyclic ones.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from ckptconv.pickles.nodes import Composite, Global, NumpyArray, NumpyScalar, Opaque, Size, TorchConstant
from ckptconv.tensors.geometry import contiguous_strides, is_contiguous
from ckptconv.tensors.lazy import LazyTensor, Tagged, TensorFacts, same_bytes, untagged

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
