"""Strategies for what state dicts are made of: keys of every kind, containers in containers, and lazy tensors."""

from __future__ import annotations

import copy
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

from compare import text
from hypothesis import strategies as st

from ckptconv.pickles.nodes import Composite, Global, NumpyScalar, Opaque, TorchConstant
from ckptconv.structure.choice import Choice
from ckptconv.structure.keymap import describe
from ckptconv.tensors.dtypes import DTYPE_RANK, DTYPES
from ckptconv.tensors.lazy import Stored, Tagged, TensorFacts
from ckptconv.tensors.moves import File
from ckptconv.tensors.strides import contiguous_strides

texts = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(
    ["@", "dict", "a.b", "", "__metadata__", "k" * 70]
)
# Any bits at all, so that every NaN is among them.
floats = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]) | st.floats()


def keys_with(others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Whatever can be a key: values of Python's own types, `others`, and tuples and frozensets of these."""
    return st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.integers(-(2**400), 2**400)
        | floats
        | texts
        | st.binary(max_size=80)
        | st.builds(complex, floats, floats)
        | st.just(...)
        | others,
        lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner.filter(equals_itself), max_size=3),
        max_leaves=6,
    )


def containers(inner: st.SearchStrategy[Any], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Every container of Python's own, and some that occur more than once."""
    entries = st.lists(st.tuples(keys, inner), max_size=4)
    some = st.lists(inner, max_size=4)
    # Names with a special meaning to Python are not read.
    taken = frozenset(dir(OrderedDict))
    attributes = texts.filter(lambda name: name not in taken and not name.startswith("__"))
    return (
        st.dictionaries(texts, inner, max_size=4)
        | entries.map(dict)
        | entries.map(OrderedDict)
        | st.builds(
            _with_attributes,
            entries,
            st.dictionaries(attributes, inner, max_size=2),
        )
        | entries.map(lambda e: defaultdict(list, e))
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
        | some
        | some.map(tuple)
        | some.map(lambda items: deque(items, maxlen=9))
        | st.sets(keys.filter(equals_itself), max_size=4).filter(_tells_apart)
        | some.map(lambda items: [items, items, *items])
        | some.map(lambda items: {"a": tuple(items), "b": [items, (items,)]})
    )


def equals_itself(key: Any) -> bool:
    """Whether a copy of `key` is the same key, as one with a NaN in it is not."""
    return bool(key == copy.deepcopy(key))


def _with_attributes(entries: list[Any], attributes: dict[str, Any]) -> Any:
    tree = OrderedDict(entries)
    vars(tree).update(attributes)
    return tree


def _tells_apart(elements: set[Any]) -> bool:
    # The comparison sorts elements by their text.
    return len({text(element) for element in elements}) == len(elements)


def nodes(tree: Any) -> list[Any]:
    """All that is in a tree, each object once."""
    found, seen = [tree], {id(tree)}
    for node in found:
        inside: list[Any] = []
        if isinstance(node, dict):
            inside = list(node.values())
        elif isinstance(node, (list, tuple, deque)):
            inside = list(node)
        for child in inside:
            if id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def tie_into_a_cycle(tree: Any, data: st.DataObject) -> None:
    """Put some container of `tree` into some other, or into itself."""
    places = [node for node in nodes(tree) if type(node) in (list, dict)]
    if not places:
        return
    place, target = data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))
    if type(place) is list:
        place.append(target)
    else:
        place["back"] = target


SOURCE = File("model.pt", 1 << 40)


_offsets = iter(range(0, 1 << 40, 4096))


def lazy(dtype: str = "float32", shape: tuple[int, ...] = (2, 3)) -> Stored:
    """A tensor in a file, in a place of its own."""
    return Stored(SOURCE, next(_offsets), DTYPES[dtype], shape, contiguous_strides(shape))


def view(
    storage: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *, nbytes: int = 4000, **facts: Any
) -> Tagged:
    """A float32 view of a storage, as a pickle describes it."""
    stored = Stored(File(f"{storage}.pt", nbytes), offset * 4, DTYPES["float32"], shape, strides)
    return Tagged(
        stored, TensorFacts(**facts, storage=storage, storage_nbytes=nbytes, storage_offset=offset, strides=strides)
    )


def views(base: Any, *makers: Any) -> list[Any]:
    """What each maker makes of one tensor."""
    return [make(base) for make in makers]


def in_file_order(flat: dict[str, Any]) -> dict[str, Any]:
    """What reading a safetensors file gives: its order is its own."""

    def place(name: str) -> tuple[int, str]:
        dtype = flat[name].dtype
        return -DTYPE_RANK[getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")], name

    return {name: flat[name] for name in sorted(flat, key=place)}


keys = keys_with(
    st.builds(Global, texts, texts)
    | st.builds(TorchConstant, st.just("dtype"), st.sampled_from(["float32", "int8"]))
    | st.builds(NumpyScalar, st.just("<f8"), st.binary(min_size=8, max_size=8))
)


tensors = st.builds(
    lazy, st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 3), max_size=3).map(tuple)
) | st.builds(
    view,
    st.sampled_from("abc"),
    st.integers(0, 5),
    st.just((2, 3)),
    st.sampled_from([(3, 1), (1, 2), (0, 1), (10, 1)]),
    kind=st.sampled_from(["tensor", "parameter", "m.Class"]),
    requires_grad=st.booleans(),
)


def _states(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, max_size=4)
    return (
        containers(inner, keys)
        | st.builds(slice, inner, inner, inner)
        | st.builds(
            Opaque,
            st.builds(Global, texts, texts),
            some.map(tuple),
            st.none() | st.dictionaries(texts, inner, max_size=2),
            st.sampled_from(["reduce", "newobj", "newobj_ex"]),
            some,
            some,
            st.lists(st.tuples(inner, inner), max_size=2),
        )
        | st.builds(Composite, texts.filter(bool), st.dictionaries(texts, inner, max_size=3))
    )


trees = st.recursive(
    keys | tensors | st.binary().map(bytearray) | st.builds(range, st.integers(-9, 9)), _states, max_leaves=25
)


def chosen(tree: Any, *exclude: str) -> tuple[dict[str, Any], str | None]:
    """The tensors of a tree but for those that are left out by name, and their record."""
    choice = Choice((), exclude)
    described = describe(tree, choice=choice)
    return {name: tensor for name, tensor in described.tensors.items() if name in choice}, described.structure
