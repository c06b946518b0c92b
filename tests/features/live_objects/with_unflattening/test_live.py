"""Trees of live objects come back: tensors that share memory as before, and constants of torch and numpy."""

from __future__ import annotations

import collections
import datetime
import enum
import io
import math
import sys
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from compare import assert_same
from effort import every
from records import MALFORMED, UNKNOWN, record
from states import NAN, STATES
from trees import chosen, in_file_order, lazy, views

from ckptconv.errors import CorruptError
from ckptconv.features.unflattening.decoder import unflatten
from ckptconv.pickles.nodes import Composite, Global, NumpyScalar, TorchConstant
from ckptconv.structure.choice import Choice
from ckptconv.structure.keymap import flatten, remap

# ------------------------------------------------------------------------------------------------------- live torch


def live_round_trip(tree: Any) -> tuple[dict[str, Any], str | None]:
    """Assert that a tree of torch tensors comes back from copies of its tensors, as from a file, and from memory."""
    flat, structure = flatten(tree)
    assert_same(tree, unflatten(flat, structure))
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in in_file_order(flat).items()}
    again = unflatten(copies, structure)
    assert_same(tree, again)
    return flat, structure


def test_a_model_comes_back_with_its_metadata_and_its_tied_weights() -> None:
    model = torch.nn.Sequential(
        OrderedDict(
            embed=torch.nn.Embedding(5, 4), norm=torch.nn.BatchNorm1d(4), head=torch.nn.Linear(4, 5, bias=False)
        )
    )
    model.head.weight = model.embed.weight
    state = model.state_dict()
    live_round_trip(state)
    live_round_trip({"model": state, "ema": state})
    live_round_trip(dict(model.named_parameters(remove_duplicate=False)))


def _tensor_with_attributes() -> Any:
    tensor = torch.arange(4.0)
    tensor.ds_id = 7  # type: ignore[attr-defined]
    tensor.partner = [torch.ones(2), tensor]  # type: ignore[attr-defined]
    return tensor


def _overlapping() -> Any:
    base = torch.arange(100, dtype=torch.float32)
    return {
        "whole": base,
        "part": base[10:20],
        "overlap": base[15:25].view(2, 5),
        "transposed": base[:50].view(5, 10).t(),
        "column": base.view(10, 10)[:, 3],
        "expanded": base[:5].expand(4, 5),
        "windows": base.unfold(0, 4, 1),
        "bytes": base.view(torch.uint8)[4:8],
        "apart": torch.arange(100, dtype=torch.float32),
    }


def _views_of_a_giant() -> Any:
    base = torch.randn(1 << 20)
    return {"a": base[100:110], "b": base[105:120], "c": base[1 << 19 :][:5]}


# Numpy's arrays of any strides become contiguous ones: here are some that are.
LIVE = {
    "numpy's own": lambda: [np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.float64(0.1)],
    **{name: make for name, make in STATES.items() if name != "numpy"},
    "attributes": _tensor_with_attributes,
    "tied part of a storage": lambda: views(torch.randn(9), lambda t: t[3:5], lambda t: t[3:5]),
    "overlapping": _overlapping,
    "complex and its parts": lambda: views(
        torch.randn(4, dtype=torch.complex128), torch.Tensor.detach, torch.view_as_real, torch.imag
    ),
    "NaNs in complex views": lambda: views(
        torch.full((3,), complex(math.nan, 1), dtype=torch.complex128), torch.Tensor.detach, lambda t: t[1:]
    ),
    "meta": lambda: {"m": torch.empty(3, 4, device="meta"), "p": torch.nn.Parameter(torch.empty(2, device="meta"))},
}


@pytest.mark.filterwarnings("ignore")
@every("case", LIVE)
def test_live_round_trip(case: str) -> None:
    live_round_trip(LIVE[case]())


def test_views_share_their_memory_again() -> None:
    flat, structure = flatten(_overlapping())
    again = unflatten({name: tensor.clone() for name, tensor in flat.items()}, structure)
    again["whole"].zero_()
    assert all(again[name].count_nonzero() == 0 for name in again if name != "apart")
    assert again["apart"].count_nonzero() == 99


def test_little_views_of_a_giant_storage_do_not_bring_it_back() -> None:
    tree = {name: tensor for name, tensor in _views_of_a_giant().items() if name != "c"}
    flat, structure = flatten(tree)
    again = unflatten({name: tensor.clone() for name, tensor in flat.items()}, structure)
    assert again["a"].untyped_storage().nbytes() <= 200
    again["a"].zero_()
    assert again["b"].count_nonzero() == 10


def test_views_too_far_apart_stay_apart_and_keep_their_values() -> None:
    tree = _views_of_a_giant()
    flat, structure = flatten(tree)
    again = unflatten({name: tensor.clone() for name, tensor in flat.items()}, structure)
    assert all(torch.equal(tree[name], again[name]) for name in tree)
    assert again["a"].untyped_storage().nbytes() < 1000


def test_values_win_over_sharing() -> None:
    base = torch.arange(4.0)
    flat, structure = flatten({"a": base, "b": base[:2]})
    again = unflatten({"a": flat["a"].clone(), "b": torch.tensor([7.0, 8.0])}, structure)
    assert again["a"].tolist() == [0, 1, 2, 3]
    assert again["b"].tolist() == [7, 8]


def test_tensors_that_were_cast_share_memory_as_before() -> None:
    base = torch.arange(6.0)
    flat, structure = flatten({"a": base, "b": base[2:4], "i": base.view(torch.int32)[1:3]})
    cast = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in flat.items()
    }
    again = unflatten(cast, structure)
    again["a"][2] = 9
    assert again["b"].tolist() == [9, 3]
    assert again["i"].view(torch.float32).tolist() == [1, 2]


def test_the_tensors_given_are_left_as_they_are() -> None:
    base = torch.arange(6.0)
    flat, structure = flatten([base, base[:3], torch.nn.Parameter(base)])
    copies = {name: tensor.clone() for name, tensor in flat.items()}
    before = {name: (tensor.data_ptr(), tensor.requires_grad, type(tensor)) for name, tensor in copies.items()}
    unflatten(copies, structure)
    assert before == {name: (tensor.data_ptr(), tensor.requires_grad, type(tensor)) for name, tensor in copies.items()}


def test_conjugate_and_negated_tensors_are_stored_as_the_values_they_stand_for() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    flat, structure = flatten({"c": base.conj(), "n": base.conj().imag, "t": base})
    assert not any(tensor.is_conj() or tensor.is_neg() for tensor in flat.values())
    again = unflatten(flat, structure)
    assert again["c"].tolist() == [1 - 2j, 3 + 4j]
    assert again["n"].tolist() == [-2, 4]


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: Any
    y: Any


class Custom:
    def __init__(self) -> None:
        self.weight = torch.ones(2)
        self.me = self


def test_objects_of_other_classes_become_what_they_would_be_pickled_as() -> None:
    tree = {
        "p": Point(torch.ones(1), 2),
        "e": Colour.RED,
        "c": Custom(),
        "d": datetime.date(2024, 1, 1),
        "f": math.sqrt,
    }
    flat, structure = flatten(tree)
    assert list(flat) == ["p.args.0", "c.state.0.weight"]
    again = unflatten(flat, structure)
    assert (str(again["p"].cls), again["p"].call, again["p"].args[1]) == (f"{__name__}.Point", "newobj", 2)
    assert (str(again["e"].cls), again["e"].args) == (f"{__name__}.Colour", (1,))
    assert again["c"].state[0]["me"] is again["c"]
    assert again["d"].name == "datetime.date"
    assert again["f"] == Global("math", "sqrt")
    assert_same(again, unflatten(*flatten(again)))


def test_subclasses_of_tensors_come_back_as_tensors_that_know_their_class_when_lazy() -> None:
    class Sub(torch.Tensor):
        pass

    flat, structure = flatten({"s": torch.ones(2).as_subclass(Sub)})
    assert type(flat["s"]) is torch.Tensor
    assert type(unflatten(flat, structure)["s"]) is torch.Tensor
    lazily = unflatten({"s": lazy()}, structure)["s"]
    assert lazily.facts.kind.endswith("Sub")


def test_numpy_arrays_as_leaves_are_put_back() -> None:
    _, structure = flatten({"x": [torch.ones(2), 1.5]})
    array = np.ones(2)
    assert unflatten({"x.0": array}, structure)["x"][0] is array


def test_live_values_can_be_had_or_not() -> None:
    _, structure = flatten([torch.float32, np.int8(1)])
    assert unflatten({}, structure) == [torch.float32, np.int8(1)]
    assert_same(
        unflatten({}, structure, live_values=False), [TorchConstant("dtype", "float32"), NumpyScalar("|i1", b"\1")]
    )


def test_of_an_object_that_occurs_twice_one_place_can_be_left_out() -> None:
    tensor = torch.nn.Parameter(torch.ones(2))
    again = unflatten(*chosen([tensor, tensor, tensor], "0"))
    assert again[0] is None
    assert again[1] is again[2]
    assert type(again[1]) is torch.nn.Parameter


def test_a_tensor_in_a_key_or_among_attributes_keeps_its_place() -> None:
    """What holds a chosen tensor is kept, though nothing else in it was chosen."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.extra = torch.zeros(2)
    parameter.note = "n"
    tree = {("k", torch.ones(1)): 5, "p": parameter}
    flat, _ = flatten(tree)
    for exclude in (["p"], ["p", "*note"], ["*.*"], ["k*"], ["*[!k]*.extra"]):
        left, structure = chosen(tree, *exclude)
        unflatten(left, structure)
        assert set(left) == {name for name in flat if name in Choice((), exclude)}


def test_tied_tensors_can_be_stored_once() -> None:
    base = torch.arange(4.0)
    tree = {"a": base, "b": base.detach(), "m": {"c": base}}
    flat, structure = flatten(tree)
    aliased = remap(structure, {name: f"x.{name}" for name in flat}, {"x.b": "x.a", "x.m.c": "x.a"})
    assert_same(tree, unflatten({"x.a": flat["a"].clone()}, aliased))


@every("text", MALFORMED)
def test_a_malformed_record_is_refused_for_live_tensors_too(text: str) -> None:
    with pytest.raises(CorruptError):
        unflatten({"t": torch.ones(2, 3)} if '"name": "t"' in text else {}, text, live_values=True)


def test_nothing_live_is_made_of_a_name_that_is_not_known() -> None:
    text = record(["list", *UNKNOWN])
    again = unflatten({}, text, live_values=True)
    assert [type(node) for node in again] == [*[TorchConstant] * 3, *[NumpyScalar] * 2, Composite]
    assert "antigravity" not in sys.modules


def test_a_record_cannot_ask_for_memory_that_its_tensors_do_not_need() -> None:
    text = record(
        ["list", {"name": "a", "storage": [0, 0, [2**45, 1]]}, {"name": "b", "storage": [0, 0, [2**45, 1]]}],
        storages=[[2**60, "float32"]],
    )
    again = unflatten({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, text)
    assert torch.equal(again[0], torch.ones(2, 3))


def test_the_comparison_used_here_notices_what_it_should() -> None:
    one, metadata = [lazy()], STATES["OrderedDict with _metadata"]()
    pair = views(torch.ones(2), torch.Tensor.detach, lambda t: t[:1])
    different = [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (math.nan, NAN),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({}, OrderedDict()),
        ([one, one], [one, list(one)]),
        ([one, list(one)], [one, one]),
        (metadata, OrderedDict(metadata)),
        (deque([1]), deque([1], maxlen=1)),
        (torch.ones(2), torch.ones(2, requires_grad=True)),
        (torch.ones(2), torch.nn.Parameter(torch.ones(2), requires_grad=False)),
        (torch.ones(2, 3), torch.ones(3, 2).t()),
        (torch.zeros(1), -torch.zeros(1)),
        ([torch.ones(2)] * 2, views(torch.ones(2), torch.Tensor.detach, torch.Tensor.detach)),
        (pair, [torch.ones(2), torch.ones(1)]),
        ([torch.ones(2), torch.ones(1)], pair),
        (pair, views(torch.ones(2), torch.Tensor.detach, lambda t: t[1:])),
        ("é", "e\u0301"),
        (b"a", bytearray(b"a")),
        (collections.Counter(a=1), {"a": 1}),
    ]
    for left, right in different:
        with pytest.raises(AssertionError):
            assert_same(left, right)
    buffer = io.BytesIO()
    tree = {name: tensor for name, tensor in _overlapping().items() if name != "bytes"}
    torch.save(tree, buffer)
    buffer.seek(0)
    assert_same(tree, torch.load(buffer))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@every("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128])
def test_typed_storages_stay_storages_and_share_their_memory(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype)
    state = {"s": tensor.storage(), "t": tensor[1:3], "again": [tensor.storage()], "other": tensor.clone().storage()}
    flat, structure = flatten(state)
    for tensors in (flat, {name: value.clone() for name, value in flat.items()}):
        got = unflatten(tensors, structure)
        storages = got["s"], got["again"][0], got["other"]
        assert all((type(one), one.dtype) == (torch.TypedStorage, dtype) for one in storages)
        assert all(one.tolist() == tensor.tolist() for one in storages)
        places = [one.untyped().data_ptr() for one in storages]
        assert places[0] == places[1] != places[2]
        assert torch.equal(got["t"], tensor[1:3])
        assert got["t"].data_ptr() == places[0] + dtype.itemsize


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_an_untyped_storage_comes_back_as_one_of_bytes() -> None:
    untyped = torch.ones(3).untyped_storage()
    again = unflatten(*flatten({"u": untyped}))["u"]
    assert (type(again), again.dtype, again.tolist()) == (torch.TypedStorage, torch.uint8, untyped.tolist())
