"""Tensors that are read a phrase of opcodes at a time are what they are when they are read opcode by opcode."""

from __future__ import annotations

import io
import itertools
import pickle
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.errors import CkptconvError
from ckptconv.formats.detect import open_source
from ckptconv.formats.torch.objects import vocabulary
from ckptconv.formats.torch.storages import Storage, StorageId, storage_id
from ckptconv.pickles import fastpath, machine
from ckptconv.pickles.vocabulary import MalformedError
from ckptconv.tensors.moves import File

FILE = File("storages", 1 << 30)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


class Pickler(pickle.Pickler):
    """Writes tensors as torch.save does, their storages at the places that `location` names anew each time."""

    def __init__(self, file: io.BytesIO, location: Callable[[], str]) -> None:
        super().__init__(file, protocol=2)
        self.location = location
        self.keys: dict[int, str] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.storage.TypedStorage):
            return None
        key = self.keys.setdefault(value._cdata, str(len(self.keys)))
        legacy = getattr(torch, torch.storage._dtype_to_storage_type_map()[value.dtype])
        return "storage", legacy, key, self.location(), value._size()


def pickled(tree: Any, location: Callable[[], str] = lambda: "cpu") -> bytes:
    file = io.BytesIO()
    pickler = Pickler(file, location)
    # Something takes the places that have a shorter opcode.
    taken = [object() for _ in range(256)]
    pickler.memo = {id(each): (place, each) for place, each in enumerate(taken)}
    pickler.dump([None, tree])
    protocol, rest = file.getvalue()[:2], file.getvalue()[2:]
    return protocol + b"N" + b"".join(b"q%c" % place for place in range(256)) + b"0" + rest


def anew() -> Callable[[], str]:
    """The name of a device as torch makes it: another string each time."""
    numbers = itertools.cycle((0, 0, 7))
    return lambda: f"cuda:{next(numbers)}"


def resolve(pid: Any) -> Storage:
    wanted = storage_id(pid)
    if not re.fullmatch("[0-9]{1,3}", wanted.key):
        raise MalformedError("has no such storage")
    nbytes = wanted.numel * wanted.dtype.itemsize
    return Storage(FILE, int(wanted.key) * 4096, nbytes, wanted.dtype, wanted.key, ("storage", wanted.key))


def places(wanted: StorageId) -> Callable[[Sequence[str]], tuple[File, list[int], list[Hashable]]]:
    def find(keys: Sequence[str]) -> tuple[File, list[int], list[Hashable]]:
        near = [*itertools.takewhile(lambda key: len(key) <= 3, keys)]
        return FILE, [int(key) * 4096 for key in near], [("storage", key) for key in near]

    return find


def outcome(data: bytes, *, at_once: bool) -> tuple[Any, Any, int]:
    """What can be told of what becomes of a pickle, its value, and how many tensors were made a phrase at a time."""
    made: list[str] = []

    def noted(wanted: StorageId) -> Callable[[Sequence[str]], tuple[File, list[int], list[Hashable]]]:
        find = places(wanted)

        def noting(keys: Sequence[str]) -> tuple[File, list[int], list[Hashable]]:
            made.extend(keys)
            return find(keys)

        return noting

    try:
        loaded = machine.load(data, vocabulary(resolve, noted if at_once else None), where="pickle")
    except CkptconvError as error:
        return (type(error), error.message), None, len(made)
    told = repr(loaded.value), shared(loaded.value), loaded.end, loaded.globals, loaded.opaque
    return told, loaded.value, len(made)


def shared(value: Any) -> list[int]:
    """Which of the values in a tree are the same object, as numbers in the order of the tree."""
    numbers: dict[int, int] = {}
    order = []
    rest = [value]
    while rest:
        value = rest.pop()
        if type(value) not in (int, str, bool, type(None)):
            known = id(value) in numbers
            order.append(numbers.setdefault(id(value), len(numbers)))
            if not known and isinstance(value, dict):
                rest.extend(value.values())
            elif not known and isinstance(value, (list, tuple)):
                rest.extend(value)
    return order


shapes = st.lists(st.integers(0, 5), max_size=5)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    tensor = torch.empty(draw(shapes), dtype=draw(st.sampled_from(DTYPES)))
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[tensor.shape[0] // 2 :]
    return tensor


trees = st.lists(
    tensors() | st.tuples(tensors(), tensors()) | st.dictionaries(st.text(max_size=3), tensors(), max_size=3),
    max_size=6,
)


@examples(80)
@given(trees, st.booleans(), st.data())
def test_tensors_are_the_same_at_once_and_opcode_by_opcode(tree: Any, remote: bool, data: st.DataObject) -> None:
    again = data.draw(st.lists(st.sampled_from(tree), max_size=2)) if tree else []
    written = pickled([tree, again], anew() if remote else lambda: "cpu")
    assert outcome(written, at_once=True)[0] == outcome(written, at_once=False)[0]


@pytest.mark.parametrize("location", [lambda: "cpu", anew()], ids=["shared location", "location anew"])
def test_of_tensors_that_are_alike_all_but_the_first_are_made_at_once(location: Callable[[], str]) -> None:
    tree = {f"layer.{n}": torch.zeros(4, 3) for n in range(50)} | {f"step.{n}": torch.zeros(()) for n in range(50)}
    _, value, count = outcome(pickled(tree, location), at_once=True)
    assert count == 99
    assert [leaf.shape for leaf in value[1].values()] == [(4, 3)] * 50 + [()] * 50


def test_what_was_made_at_once_can_be_referred_to() -> None:
    tied = torch.zeros(3)
    tree = [torch.ones(2), tied, torch.ones(2), {"tied": tied}, tied.view(1, 3)]
    _, value, count = outcome(pickled(tree), at_once=True)
    # The one that shares its storage fetches the key of that.
    assert count == 3
    first, tied_leaf, _, again, view = value[1]
    assert again["tied"] is tied_leaf
    assert view.facts.storage == tied_leaf.facts.storage != first.facts.storage


def mutations(data: bytes, dice: random.Random) -> Iterator[bytes]:
    """`data` with a few bytes changed, copied, or left out where the tensors are."""
    begin = data.index(b"_rebuild_tensor_v2")
    while True:
        changed = bytearray(data)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(begin, len(changed))
            kind = dice.randrange(5)
            if kind == 0:
                changed[at] = dice.randrange(256)
            elif kind == 1:
                changed[at] ^= 1 << dice.randrange(8)
            elif kind == 2:
                changed[at] = changed[dice.randrange(begin, len(changed))]
            elif kind == 3:
                del changed[at : at + dice.randint(1, 8)]
            else:
                part = changed[at : at + dice.randint(1, 80)]
                place = dice.randrange(begin, len(changed))
                changed[place:place] = part
        yield bytes(changed)


@pytest.mark.parametrize("location", [lambda: "cpu", anew()], ids=["shared location", "location anew"])
def test_damage_comes_out_the_same_at_once_and_opcode_by_opcode(location: Callable[[], str]) -> None:
    tree = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3), "c": (torch.zeros(()), torch.zeros(3)), "d": torch.zeros(7)}
    tree |= {f"w{n}": torch.zeros(2, 3) for n in range(4)}
    written = pickled(tree, location)
    read = 0
    for changed in itertools.islice(mutations(written, random.Random(7)), 600):
        fast, _, count = outcome(changed, at_once=True)
        assert fast == outcome(changed, at_once=False)[0]
        read += count
    assert read > 800


@contextmanager
def opcode_by_opcode() -> Iterator[None]:
    with mock.patch.object(fastpath, "phrase_of", return_value=re.compile(rb"(?!)")):
        yield


def test_a_file_of_torch_says_the_same_either_way(tmp_path: Path) -> None:
    state = OrderedDict((f"w{n}", torch.randn(n % 4, 5)) for n in range(200))
    state["tied"] = state["w3"]
    state["part"] = state["w7"][1:, ::2]
    torch.save({"model": state, "step": torch.tensor(3)}, tmp_path / "model.pt")
    fast = open_source(str(tmp_path / "model.pt")).weights
    with opcode_by_opcode():
        slow = open_source(str(tmp_path / "model.pt")).weights

    def told(tree: Any) -> Any:
        return [(name, leaf.tensor, leaf.facts._replace(storage=None)) for name, leaf in tree["model"].items()]

    assert told(fast) == told(slow)
    storages = [leaf.facts.storage for leaf in fast["model"].values()]
    assert len(set(storages)) == 200
    assert storages[200] == storages[3]
    assert storages[201] == storages[7]
