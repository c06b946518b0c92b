"""Lazy tensors as JSON: every expression comes back as it was, and nothing else is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cells import of_features
from hypothesis import given
from hypothesis import strategies as st
from kernel_samples import SAMPLES

from ckptconv.features.virtual.expressions import EXPRESSIONS, KERNELS, MAX_DEPTH, Decoder, Encoder
from ckptconv.tensors import computing, lazy, moves
from ckptconv.tensors.computing import Bits, Join, Joined, Tiled
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import (
    Concat,
    Convert,
    Inline,
    LazyTensor,
    Narrow,
    Partitioned,
    Picked,
    Stored,
    Tagged,
    TensorFacts,
    View,
    Zeros,
)
from ckptconv.tensors.moves import Cast, Conjugate, File, Negate, Packed, Swap

F32, BF16, I64, I32, U8, U16, C64 = (
    DTYPES[name] for name in ("float32", "bfloat16", "int64", "int32", "uint8", "uint16", "complex64")
)
RANKS = tuple(File(f"rank{rank}", 4096, f"{rank:x}") for rank in range(3))
FILE, BASES = RANKS[0], (64, 128, 64)
INSIDE = File("all.zip!data", 4096, "", Packed(FILE, 8, 400, 77))
MATRIX = Stored(FILE, 16, F32, (6, 4), (1, 6))
PIECES = Partitioned(RANKS, BASES, 8, 5, F32, (2, 7))
BYTES = Stored(FILE, 3, U8, (6,), (1,))
EVERY: list[LazyTensor] = [
    MATRIX,
    Stored(FILE, 0, F32, (), ()),
    Stored(FILE, 4096, F32, (0, 3), (3, 1)),
    Stored(FILE, 8, F32, (9, 3), (0, 1)),
    Stored(INSIDE, 96, F32, (1000,), (1,)),
    PIECES,
    Partitioned(RANKS, BASES, 500, 5, F32, (11,)),
    Concat((MATRIX, Stored(FILE, 200, F32, (6, 2), (2, 1))), 1),
    Narrow(MATRIX, 1, 1, 2),
    View(PIECES, I32, (14,)),
    Picked(PIECES, 2, (2, 3), (1, 4)),
    Convert(PIECES, Cast("float32", "bfloat16"), BF16),
    Convert(MATRIX, Swap(4), F32),
    Convert(MATRIX, Negate("float32"), F32),
    Convert(Stored(FILE, 0, C64, (2,), (1,)), Conjugate("complex64"), C64),
    Convert(Stored(FILE, 0, I32, (2,), (1,)), Bits(4, 3, 5, 8), I64),
    Joined((Stored(FILE, 0, I32, (2,), (1,)), Stored(FILE, 9, U8, (2,), (1,))), Join(((4, 0, 32), (1, 32, 8)), 8), I64),
    *(made(BYTES, BYTES, Stored(FILE, 80, U16, (6,), (1,))) for each in of_features("CHANGES") for made in each),
    *(made(FILE) for each in of_features("EXPRESSIONS") for made in each),
    Inline(b"\0\xff\x80?", F32, ()),
    Zeros(BF16, (3, 0, 2)),
]


def through_json(*tensors: LazyTensor) -> list[LazyTensor]:
    encoder = Encoder()
    told = json.loads(json.dumps([encoder.encode(tensor) for tensor in tensors]))
    decoder = Decoder(encoder.files, json.loads(json.dumps(encoder.lists)))
    return [decoder.decode(each) for each in told]


def test_every_expression_comes_back_as_it_was() -> None:
    assert through_json(*EVERY) == EVERY


def test_every_class_of_expression_has_a_name() -> None:
    known = {**vars(lazy), **vars(computing)}.values()
    classes = {each for each in known if isinstance(each, type) and issubclass(each, LazyTensor)}
    abstract = {LazyTensor, lazy.Derived, lazy.Composed, computing.Computed, lazy.Virtual}
    assert {kind.cls for kind in EXPRESSIONS.values()} == classes - abstract - {Tagged}
    # Features have all kernels that make tiles.
    tiled = set() if any(of_features("EXPRESSIONS")) else {Tiled}
    assert {type(each) for each in EVERY} == {kind.cls for kind in EXPRESSIONS.values()} - tiled


@pytest.mark.parametrize("kernel", SAMPLES)
def test_every_kernel_comes_back_as_it_was(kernel: type[Any]) -> None:
    assert through_json(SAMPLES[kernel]) == [SAMPLES[kernel]]


def test_every_kernel_of_the_table_has_a_sample() -> None:
    assert {*KERNELS.values()} <= SAMPLES.keys()


def test_facts_about_a_leaf_are_left_out() -> None:
    assert through_json(Tagged(MATRIX, TensorFacts("parameter", True))) == [MATRIX]


def test_tensors_of_the_same_ranks_share_their_list() -> None:
    one, other = through_json(PIECES, Partitioned(RANKS, BASES, 28, 2, F32, (6,)))
    assert isinstance(one, Partitioned)
    assert isinstance(other, Partitioned)
    assert one.files is other.files
    assert one.bases is other.bases


LISTS = [[0, 1, 2], [64, 128, 64]]
REFUSED: dict[str, tuple[Any, str]] = {
    "no list": ({}, "an object is not a known expression"),
    "no name": ([], "not a known expression"),
    "another name": (["eval", 1], "not a known expression"),
    "a name of another type": ([["stored"]], "not a known expression"),
    "too few fields": (["stored", 0, 0, "float32", []], "4 fields, but stored must have 5"),
    "another source": (["stored", 9, 0, "float32", [], []], "source 9"),
    "a negative offset": (["stored", 0, -4, "float32", [1], [1]], "-4 is not a count"),
    "an offset that is no integer": (["stored", 0, True, "float32", [1], [1]], "True is not a count"),
    "the end of the file": (["stored", 0, 4092, "float32", [2], None], "byte 4100 of rank0, which has only 4096"),
    "strides beyond the file": (["stored", 0, 0, "float32", [2], [1 << 40]], "which has only 4096"),
    "other strides": (["stored", 0, 0, "float32", [2, 2], [1]], "do not match shape"),
    "a dtype": (["stored", 0, 0, "object", [2], [1]], "'object' is not a dtype"),
    "too many dimensions": (["zeros", "float32", [1] * 65], "at most 64 counts"),
    "too many elements": (["zeros", "float32", [1 << 40, 1 << 40]], "more elements than can be counted"),
    "elements of an empty tensor": (["zeros", "float32", [0, 1 << 40, 1 << 40]], "more elements than can be counted"),
    "pieces that are too few": (["partitioned", 0, 1, 0, 1, "float32", [4]], "4 elements do not fit in 3 pieces"),
    "pieces of nothing": (["partitioned", 0, 1, 0, 0, "float32", [4]], "4 elements do not fit in 3 pieces"),
    "pieces beyond the file": (["partitioned", 0, 1, 4000, 9, "float32", [27]], "which has only 4096"),
    "another list": (["partitioned", 7, 1, 0, 1, "float32", [3]], "list 7"),
    "as many bases as files": (["partitioned", 0, 2, 0, 1, "float32", [3]], "list 2"),
    "nothing to join": (["concat", [], 0], "not a list of expressions"),
    "elements picked beyond the end": (["picked", ["zeros", "float32", [4]], 2, [2], [2]], "beyond the end"),
    "a dimension": (["concat", [["zeros", "float32", [1]]], 1], "no dimension 1"),
    "other shapes": (["concat", [["zeros", "float32", [1, 2]], ["zeros", "float32", [1, 3]]], 0], "cannot join"),
    "a cut": (["narrow", ["zeros", "float32", [4]], 0, 3, 2], "is outside"),
    "a view": (["view", ["zeros", "float32", [4]], "int64", [3]], "16 bytes cannot be viewed"),
    "a kernel": (["convert", ["zeros", "float32", [4]], ["run", "x"], "float32"], "not a known kernel"),
    "a cast of another dtype": (
        ["convert", ["zeros", "float32", [4]], ["cast", "int64", "float32"], "float32"],
        "does not yield",
    ),
    "a cast that there is not": (
        ["convert", ["zeros", "int64", [4]], ["cast", "int64", "float32"], "float32"],
        "does not yield",
    ),
    "a kernel for several": (
        ["convert", ["zeros", "int32", [4]], ["join", [[2, 0, 16], [2, 16, 16]], 4], "int32"],
        "does not yield",
    ),
    **{case: refused for each in of_features("REFUSED_KERNELS") for case, refused in each.items()},
    "a swap of three bytes": (["convert", ["zeros", "float32", [4]], ["swap", 3], "float32"], "does not yield"),
    "bits that are not there": (["convert", ["zeros", "int32", [4]], ["bits", 4, 31, 2, 4], "int32"], "does not yield"),
    "a join of others": (["joined", [["zeros", "int32", [4]]], ["join", [[8, 0, 32]], 4], "int32"], "does not yield"),
    "tiles of a kernel that makes none": (
        ["tiled", [["zeros", "float32", [4]]], [[[0, 1, 1]]], ["swap", 4], "float32", [4], [0], []],
        "does not yield float32",
    ),
    "no base64": (["inline", "\u00e9", "uint8", [1]], "not text in base64"),
    "another length": (["inline", "AAA=", "uint8", [1]], "2 bytes are not a tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_encoder_makes_is_refused(case: str) -> None:
    told, message = REFUSED[case]
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        Decoder(RANKS, LISTS).decode(told)
    assert message in str(caught.value)


def test_nesting_is_bounded() -> None:
    told: Any = ["zeros", "float32", [2]]
    for _ in range(MAX_DEPTH):
        told = ["view", told, "float32", [2]]
    with pytest.raises(ValueError, match="nested more than 32 levels"):
        Decoder(RANKS, []).decode(told)


SMALL = st.integers(-2, 9) | st.sampled_from([4000, 4096, 1 << 62, 1 << 70])
LEAVES = (
    SMALL
    | st.none()
    | st.booleans()
    | st.sampled_from(
        [
            "float32",
            "bfloat16",
            "int64",
            "uint8",
            "complex64",
            "cast",
            "swap",
            "bits",
            "join",
            "own",
            "e2m1",
            "scale",
            "AAAA",
            "",
        ]
    )
)


def mutated(told: Any, data: st.DataObject) -> Any:
    """`told` with something else in one place."""
    if not isinstance(told, list) or not told or data.draw(st.integers(0, 9)) == 0:
        return data.draw(LEAVES)
    at = data.draw(st.integers(0, len(told) - 1))
    return [*told[:at], mutated(told[at], data), *told[at + 1 :]]


@given(st.sampled_from(EVERY), st.integers(0, 2), st.data())
def test_what_is_accepted_reads_nothing_outside_its_files(tensor: LazyTensor, count: int, data: st.DataObject) -> None:
    encoder = Encoder()
    told: Any = encoder.encode(tensor)
    for _ in range(count):
        told = mutated(told, data)
    try:
        made = Decoder(encoder.files, encoder.lists).decode(told)
    except ValueError:
        return
    assert all(map(inside, made.moves(0, min(made.nbytes, 4096))))


def inside(move: moves.Move) -> bool:
    if isinstance(move.source, moves.Assembled):
        return all(map(inside, move.source.moves))
    return move.file is None or (isinstance(move.source, moves.Runs) and move.source.stop <= move.file.size)
