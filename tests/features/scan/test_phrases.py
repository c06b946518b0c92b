"""What a long pickle names and calls is the same, read a phrase of opcodes at a time and opcode by opcode."""

from __future__ import annotations

import io
import itertools
import pickle
import random
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.errors import CkptconvError
from ckptconv.features.scan import phrases
from ckptconv.features.scan.bounds import LIMITS
from ckptconv.features.scan.grammar.judge import Judge
from ckptconv.features.scan.survey import survey
from ckptconv.formats.torch.objects import without_tensors
from ckptconv.pickles import watching

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


class Counted(phrases.TensorPhrases):
    """Counts the tensors that are read at once."""

    count = 0

    def read(self, data: bytes, pos: int, stack: list[Any], memo: list[Any]) -> tuple[int, int]:
        end, cost = super().read(data, pos, stack, memo)
        Counted.count += cost // 2
        return end, cost


def outcome(data: bytes, *, at_once: bool) -> tuple[Any, int]:
    """What a survey of a pickle says of it, and how many tensors were read a phrase at a time."""
    readings: list[watching.PickleReading] = []
    met: list[Any] = []
    Counted.count = 0
    never = mock.patch.object(phrases, "phrase_of", return_value=re.compile(rb"(?!)"))
    with (
        mock.patch("ckptconv.features.scan.survey.TensorPhrases", Counted),
        never if not at_once else mock.patch.object(phrases, "phrase_of", phrases.phrase_of),
        watching.watched(readings.append, Judge),
    ):
        try:
            end: Any = survey(
                lambda at, length: data[at : at + length],
                len(data),
                without_tensors(),
                where="pickle",
                limits=LIMITS,
                met=lambda *each: met.append(each),
                placed=met.append,
            )
        except CkptconvError as error:
            end = type(error), error.message
    return (end, met, [reading._replace(value=None) for reading in readings]), Counted.count


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
def test_of_tensors_that_are_alike_all_but_the_first_are_read_at_once(location: Callable[[], str]) -> None:
    tree = {f"layer.{n}": torch.zeros(4, 3) for n in range(50)} | {f"step.{n}": torch.zeros(()) for n in range(50)}
    assert outcome(pickled(tree, location), at_once=True)[1] == 99


def test_what_was_read_at_once_can_be_referred_to() -> None:
    tied = torch.zeros(3)
    tree = [torch.ones(2), tied, torch.ones(2), {"tied": tied}, tied.view(1, 3)]
    written = pickled(tree)
    (end, _, _), count = outcome(written, at_once=True)
    assert (end, count) == (len(written), 3)


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
        fast, count = outcome(changed, at_once=True)
        assert fast == outcome(changed, at_once=False)[0]
        read += count
    assert read > 800
