"""Entries of a description that are read a phrase at a time are what they are when they are read opcode by opcode."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from effort import every, examples
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptconv.errors import CkptconvError
from ckptconv.formats.dcp import metadata, phrases
from ckptconv.pickles import machine

DTYPES = (torch.float32, torch.bfloat16)
FILES = ("__0_0.distcp", "__1_0.distcp")
# Of one byte, of two, of four, and of more, as offsets in files are.
NUMBERS = st.sampled_from((0, 200, 256, 70_000, 1 << 31, 1 << 40, (1 << 47) - 1, 1 << 55))


def described(tensors: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int]]], values: int = 0) -> Metadata:
    """The description of tensors, by name: the offsets and sizes of their chunks, and where each is in its file."""
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for number, (name, chunks) in enumerate(tensors.items()):
        boxes = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in chunks]
        properties = TensorProperties(DTYPES[number % 7 == 3], pin_memory=number % 11 == 5)
        shape = torch.Size(chunks[0][1])
        entries[name] = TensorStorageMetadata(properties, shape, boxes)
        for index, (offsets, _, at) in enumerate(chunks):
            # What came from another rank is another string.
            of = name if index % 2 else "".join([*name])
            places[MetadataIndex(of, torch.Size(offsets), index)] = _StorageInfo(FILES[index % 2], at, 64)
    for number in range(values):
        name = f"step {number}"
        entries[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _StorageInfo("__0_0.distcp", number, 9)
    return Metadata(entries, {name: tuple(name.split(".")) for name in entries}, places)


def like_a_model(count: int) -> Metadata:
    shapes = ((4, 4), (), (300,), (2, 70_000), (1, 2, 3), (1, 2, 3, 4, 5))
    return described({
        f"model.layers.{n}": [((0,) * len(shapes[n % 6]), shapes[n % 6], n * 1641)] for n in range(count)
    })  # fmt: skip


def outcome(data: bytes, *, at_once: bool) -> Any:
    """What is described, or the error; with how many objects were given their state one by one."""
    words = metadata.vocabulary_of()
    words = words if at_once else words._replace(phrases=None)
    with (
        mock.patch.object(metadata, "vocabulary_of", return_value=words),
        mock.patch.object(phrases, "FEW", 0),
        mock.patch.object(machine.Machine, "build", autospec=True, side_effect=machine.Machine.build) as build,
    ):
        try:
            found: Any = vars(metadata.read_description([("here", data)], of_ranks=False))
        except CkptconvError as error:
            found = type(error), str(error)
    return found, build.call_count


def agree(data: bytes) -> Any:
    found, _ = outcome(data, at_once=True)
    expected, _ = outcome(data, at_once=False)
    assert found == expected
    return found


BOXES = st.integers(0, 6).flatmap(
    lambda dims: st.lists(st.tuples(*[st.tuples(*[NUMBERS] * dims)] * 2, NUMBERS), min_size=1, max_size=3)
)


@examples(20)
@given(
    st.dictionaries(st.text(max_size=300), BOXES, max_size=12),
    st.integers(0, 3),
    st.sampled_from((2, 4, 5)),
)
def test_entries_are_the_same_at_once_and_opcode_by_opcode(tensors: Any, values: int, protocol: int) -> None:
    agree(pickle.dumps(described(tensors, values), protocol))


@every("protocol", [4, 5])
def test_of_entries_that_are_alike_few_are_read_opcode_by_opcode(protocol: int) -> None:
    data = pickle.dumps(like_a_model(1000), protocol)
    found, steps = outcome(data, at_once=True)
    expected, all_steps = outcome(data, at_once=False)
    assert found == expected
    assert len(found["tensors"]) == 1000
    assert steps < 60
    assert all_steps >= 5000


def test_tensors_of_several_chunks_are_read_at_once() -> None:
    boxes = [((4 * n, 0), (4, 8), 641 * n) for n in range(5)]
    data = pickle.dumps(described({f"layer.{n}": boxes for n in range(100)}), 4)
    found, steps = outcome(data, at_once=True)
    assert found == outcome(data, at_once=False)[0]
    assert steps < 100


def test_a_short_description_is_read_without_patterns() -> None:
    with mock.patch.object(phrases, "patterns_of") as patterns:
        metadata.read_description([("here", pickle.dumps(like_a_model(20), 4))], of_ranks=False)
    assert not patterns.called


def test_what_was_made_at_once_can_be_referred_to() -> None:
    whole = like_a_model(20)
    entries: dict[str, Any] = whole.state_dict_metadata
    first, last = entries["model.layers.0"], entries["model.layers.18"]
    last.properties = first.properties
    last.chunks = first.chunks
    last.size = first.size
    found = agree(pickle.dumps(whole, 4))
    assert found["tensors"]["model.layers.18"].shape == (4, 4)


def damaged(data: bytes, number: int) -> bytes:
    choose = random.Random(number)
    at = choose.randrange(len(data) // 3, len(data))
    if number % 5 == 0:
        return data[:at]
    if number % 5 == 1:
        return data[:at] + data[at + 1 :]
    return (
        data[:at]
        + bytes([choose.choice(b")\x81\x94}(hjKMJRbuae\x8a\x8c\x00\xff") if number % 2 else data[at] ^ 4])
        + data[at + 1 :]
    )


def without_frames(data: bytes) -> bytes:
    return data[:2] + data[11:]


@every("form", [bytes, without_frames])
def test_damage_comes_out_the_same_at_once_and_opcode_by_opcode(form: Callable[[bytes], bytes]) -> None:
    data = form(pickle.dumps(like_a_model(12), 4))
    outcomes = [agree(damaged(data, number)) for number in range(80)]
    assert sum(type(found) is dict for found in outcomes) > 3
    assert sum(type(found) is tuple for found in outcomes) > 25
