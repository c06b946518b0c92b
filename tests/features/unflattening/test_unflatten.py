"""The way back from a record: flatten, then unflatten, gives the very same tree, whatever it was."""

from __future__ import annotations

import builtins
import copy
import json
import pathlib
import random
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from compare import assert_same
from effort import every, examples
from hypothesis import given
from hypothesis import strategies as st
from processes import counted
from records import MALFORMED, UNKNOWN, record
from states import STATES, deep, nested, with_one
from trees import chosen, in_file_order, lazy, nodes, tie_into_a_cycle, trees, view, views

from ckptconv.errors import CkptconvError, CorruptError, LimitError, UnsupportedError
from ckptconv.features.unflattening.decoder import unflatten
from ckptconv.formats.torch.file import read_torch
from ckptconv.pickles.nodes import Composite, Global, NumpyScalar, Opaque, Size, TorchConstant
from ckptconv.pickles.vocabulary import WHOLE_TREES
from ckptconv.structure.keymap import flatten, remap
from ckptconv.structure.record import plain_record
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Concat, Convert, Tagged, TensorFacts
from ckptconv.tensors.moves import Conjugate


def round_trip(tree: Any) -> tuple[dict[str, Any], str | None]:
    """Assert that nothing is lost on the way through a file and back."""
    flat, structure = flatten(tree)
    again = unflatten(in_file_order(flat), structure, live_values=False)
    assert_same(tree, again)
    assert flatten(again) == (flat, structure), "the way back leads to the same names and the same record"
    return flat, structure


# ------------------------------------------------------------------------------- round trips that must hold, by name


# What torch writes into no file, or writes in another way.
ODD: dict[str, Any] = {
    "tensors inside keys": lambda: {(lazy(), 1): lazy(), lazy(): [lazy()]},
    "equal tensors twice": lambda: views(lazy(), copy.copy, copy.deepcopy, lambda _: lazy()),
    "views with different dtypes": lambda: {
        "a": view("s", 0, (4,), (1,)),
        "b": Tagged(lazy("int16", (8,)), TensorFacts(storage="s", storage_nbytes=16, strides=(1,))),
    },
    "a transposed tensor alone": lambda: {"a": view("s", 0, (3, 4), (1, 3)), "b": view("t", 0, (2, 3, 4), (1, 2, 6))},
    "every dtype": lambda: {name: lazy(name) for name in DTYPES},
    "parameters, gradients, attributes": lambda: {
        "p": view("p", 0, (2,), (1,), kind="parameter", requires_grad=True),
        "frozen": view("q", 0, (2,), (1,), kind="parameter"),
        "g": view("g", 0, (2,), (1,), requires_grad=True),
        "b": view("b", 0, (2,), (1,), kind="buffer"),
        "s": view("c", 0, (2,), (1,), kind="my.module.Sub\ud800class"),
        "a": view("a", 0, (2,), (1,), attributes={"ds_id": 3, "nested": [lazy()], "t": (1, lazy())}),
        "n": view("d", 0, (2,), (1,), attributes={}),
        "x": view("e", 0, (2,), (1,), kind="my.Sub", attributes=lazy()),
        "y": view("f", 0, (2,), (1,), kind="my.Sub", attributes=5),
    },
    "Opaque": lambda: {
        "o": Opaque(Global("argparse", "Namespace"), (), None, "newobj", [{"lr": 0.1, "w": lazy()}]),
        "k": Opaque(Global("m", "C"), (1, lazy()), {}, "newobj_ex", [], [1, lazy()], [("k", lazy())]),
        "p": Opaque(Global("m", "P"), "a persistent id", None, "persistent"),
        "c": Opaque(Opaque(Global("m", "f"), (1,)), (lazy(),), {"x": lazy()}),
        Opaque(Global("torch", "Tensor"), (1,)): {Global("os", "system"), Global("m", "f")},
    },
    "Composite": lambda: {
        "e": Composite(
            "sparse_coo",
            {"indices": lazy("int64"), "values": lazy(shape=(3,)), "shape": Size((3, 3)), "is_coalesced": True},
        ),
        "m": Composite("meta", {"dtype": TorchConstant("dtype", "float32"), "shape": Size((1,)), "strides": (1,)}),
    },
    "1000-deep, mixed": lambda: nested(1000, lambda tree: OrderedDict(a=[(Opaque(Global("m", "C"), (tree,)),)])),
}


def lazily(name: str, tmp_path: pathlib.Path) -> Any:
    """A state as it is read of a file."""
    with deep():
        torch.save(STATES[name](), tmp_path / "x.pt")
    return read_torch(str(tmp_path / "x.pt"), limits=WHOLE_TREES).value


@pytest.mark.filterwarnings("ignore")  # of tensors that are in beta, or deprecated
@every("name", STATES)
def test_round_trip_of_what_is_read_of_a_file(name: str, tmp_path: pathlib.Path) -> None:
    round_trip(lazily(name, tmp_path))


@every("name", ODD)
def test_round_trip_of_other_trees(name: str) -> None:
    round_trip(ODD[name]())


def test_round_trip_of_a_tree_twenty_thousand_levels_deep() -> None:
    tree: Any = lazy()
    for level in range(20_000):
        tree = [tree] if level % 3 else {"k": tree}
    round_trip(tree)


@examples(70)
@given(trees)
def test_round_trip_of_any_tree(tree: Any) -> None:
    round_trip(tree)


@examples(50)
@given(trees, st.data())
def test_round_trip_of_any_tree_tied_into_a_cycle(tree: Any, data: st.DataObject) -> None:
    tie_into_a_cycle(tree, data)
    round_trip(tree)


def test_lazy_tensors_with_a_changed_sign_do_not_share_what_they_differ_from() -> None:
    plain = view("s", 0, (2,), (1,))
    flipped = Tagged(Convert(plain.tensor, Conjugate("float32"), DTYPES["float32"]), plain.facts)
    flat, structure = flatten({"a": plain, "b": flipped})
    again = unflatten(flat, structure)
    assert not any(isinstance(leaf, Tagged) for leaf in again.values())


def test_ties_of_expressions_over_several_files_are_kept() -> None:
    whole = Concat((lazy(), lazy()))
    again = unflatten(*flatten({"a": whole, "b": whole, "c": Concat((lazy(),))}))
    assert again["a"] is again["b"]


def test_lazy_trees_need_neither_torch_nor_numpy() -> None:
    script = (
        "import sys; from ckptconv import flatten, unflatten; from ckptconv.tensors.lazy import *\n"
        "from ckptconv.tensors.dtypes import DTYPES; from ckptconv.pickles.nodes import *\n"
        "t = Inline(b'abcd', DTYPES['float32'], ())\n"
        "tree = [t, {'a': t}, Size((1,)), TorchConstant('dtype', 'int8'), NumpyScalar('<f4', b'1234')]\n"
        "tree.append(Composite('x', {'p': t}))\n"
        "tree = unflatten(*flatten(tree)); assert type(tree[2]) is Size and type(tree[4]) is NumpyScalar\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# ------------------------------------------------------------------------------------------------ changing the names


def test_remap_gives_tensors_new_names_and_leaves_the_keys() -> None:
    tree = {"a": [lazy(), {"b": lazy()}], "c": with_one(lazy(), lambda tensor: [tensor, {"d": tensor}])}
    flat, structure = flatten(tree)
    renames = {name: f"new/{number}" for number, name in enumerate(flat)}
    renamed = remap(structure, renames)
    assert_same(tree, unflatten({renames[name]: tensor for name, tensor in flat.items()}, renamed))
    assert remap(renamed, {new: old for old, new in renames.items()}) == structure


@pytest.mark.filterwarnings("ignore")
def test_remap_with_nothing_to_do_changes_nothing(tmp_path: pathlib.Path) -> None:
    for state in STATES:
        flat, structure = flatten(lazily(state, tmp_path))
        assert remap(structure, {}) == structure, state
        assert remap(structure, {name: name for name in flat}) == structure, state
        assert remap(structure, {}, {"no such name": "nor this"}) == structure, state


@examples(50)
@given(trees, st.randoms(use_true_random=False))
def test_remap_of_any_tree(tree: Any, rng: random.Random) -> None:
    flat, structure = flatten(tree)
    if structure is None:
        return
    names = list(flat)
    rng.shuffle(names)
    renames = dict(zip(flat, names, strict=True))
    renamed = {renames[name]: tensor for name, tensor in flat.items()}
    assert_same(tree, unflatten(renamed, remap(structure, renames), live_values=False))


def test_a_tensor_left_out_is_absent_from_a_dict_and_none_in_a_sequence() -> None:
    tree = {
        "keep": lazy(),
        "drop": lazy(),
        "l": [lazy(), 1],
        "t": (lazy(), 2),
        "o": OrderedDict(x=lazy(), y=3),
        "s": {7: lazy()},
    }
    flat, structure = chosen(tree, "drop", "*.0", "*.x", "*.7")
    assert list(flat) == ["keep"]
    assert unflatten(flat, structure) == {
        "keep": flat["keep"],
        "l": [None, 1],
        "t": (None, 2),
        "o": OrderedDict(y=3),
        "s": {},
    }
    assert not any(name in (structure or "") for name in ("drop", "l.0"))


def test_what_older_records_say_was_dropped_is_read_so() -> None:
    tree = ["dict", "keep", {}, "gone", {"dropped": "gone"}, "l", ["list", {"dropped": "l.0"}, 1]]
    keep = lazy()
    assert unflatten({"keep": keep}, record(tree)) == {"keep": keep, "l": [None, 1]}


def test_a_composite_without_one_of_its_parts_is_left_out_whole() -> None:
    parts = {"indices": lazy("int64", (1, 1)), "values": lazy(shape=(1,)), "shape": Size((2,))}
    tree = {"s": Composite("sparse_coo", parts), "k": [lazy()]}
    assert list(unflatten(*chosen(tree, "s.values"))) == ["k"]
    assert "shape" not in (chosen(tree, "s.*")[1] or "")
    assert list(unflatten(*chosen(tree, "k"))) == ["s", "k"]


def test_names_made_one_without_a_shared_storage_give_one_tensor_to_both() -> None:
    one, other = lazy(), lazy()
    _, structure = flatten({"b": one, "a": other})
    again = unflatten({"b": one}, remap(structure, {}, {"a": "b"}))
    assert again == {"b": one, "a": one}


# ---------------------------------------------------------------------------------------- records that are not ours


def test_a_version_that_is_not_known_is_named_with_those_that_are() -> None:
    with pytest.raises(UnsupportedError, match=r"version 7.*only version 1"):
        unflatten({}, '{"version": 7, "tree": []}', live_values=False)


def test_tensors_missing_and_left_over_are_named() -> None:
    flat, structure = flatten({"b": [lazy() for _ in range(20)]})
    flat.pop("b.3")
    flat["stranger"] = lazy()
    with pytest.raises(CorruptError, match=r"missing \('b\.3'\).*'stranger'"):
        unflatten(flat, structure)
    with pytest.raises(CorruptError, match=r"missing .*'b\.0', .* and 15 more"):
        unflatten({}, structure, live_values=False)


@every("text", MALFORMED)
def test_a_malformed_record_is_refused(text: str) -> None:
    with pytest.raises(CorruptError):
        unflatten({"t": lazy()} if '"name": "t"' in text else {}, text, live_values=False)


@examples(100)
@given(trees, st.data())
def test_a_damaged_record_gives_an_error_of_ours_or_some_tree(tree: Any, data: st.DataObject) -> None:
    flat, structure = flatten(tree)
    text = structure or plain_record(flat)
    parts = json.loads(text)
    spots = [node for node in nodes(parts) if isinstance(node, list) and node]
    if spots:
        spot = data.draw(st.sampled_from(spots))
        at = data.draw(st.integers(0, len(spot) - 1))
        other = data.draw(st.sampled_from(spots))
        spot[at] = data.draw(
            st.sampled_from([None, 0, -1, "x", [], {}, ["@", 0], ["list"], {"name": "a"}])
            | st.just(copy.deepcopy(other))
        )
    try:
        unflatten(flat, json.dumps(parts), live_values=False)
        remap(json.dumps(parts), {})
    except CkptconvError:
        pass


def test_nothing_that_a_record_names_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def forbidden(*args: Any, **named: Any) -> Any:
        # Our own modules are imported when their turn comes; the record names none of them.
        assert args[0].startswith("ckptconv."), f"looked up {args[0]}"
        return real(*args, **named)

    text = record(["list", ["opaque", ["global", "antigravity", "f"], ["tuple", 1], "reduce"], *UNKNOWN])
    with monkeypatch.context() as patched:
        patched.setattr("builtins.__import__", forbidden)
        again = unflatten({}, text, live_values=False)
    assert [type(node) for node in again] == [Opaque, *[TorchConstant] * 3, *[NumpyScalar] * 2, Composite]
    assert "antigravity" not in sys.modules


def bomb(levels: int, tag: str = "tuple") -> list[Any]:
    return [[tag, 1], *([tag, ["@", n], ["@", n]] for n in range(levels))]


@every("root", [["dict", ["@", 60], 1], ["set", ["@", 60]], ["set", ["tuple", ["@", 60]]]])
def test_keys_that_take_forever_to_hash_are_refused(root: Any) -> None:
    with pytest.raises(LimitError, match="hash"):
        unflatten({}, record(root, nodes=bomb(60)), live_values=False)


def test_keys_that_are_too_deep_to_hash_are_refused() -> None:
    nodes: list[Any] = [["tuple"], *(["tuple", ["@", n]] for n in range(20_000))]
    with pytest.raises(LimitError, match="deep"):
        unflatten({}, record(["dict", ["@", 20_000], 1], nodes=nodes), live_values=False)


def test_keys_with_one_hash_are_refused() -> None:
    numbers = [["int", hex((2**61 - 1) * n + 5)] for n in range(30, 5_030)]
    for root in (["set", *numbers], ["dict", *(part for number in numbers for part in (number, 1))]):
        with pytest.raises(LimitError, match="same hash"):
            unflatten({}, record(root), live_values=False)


def test_tensors_and_values_take_a_few_calls_each() -> None:
    def taken(tensors: int, values: int) -> int:
        tree = {
            "tensors": {f"w{n}": lazy(shape=(3,)) for n in range(tensors)},
            "values": [{"i": n, "f": n * 0.1, "s": str(n), "t": (n, None), "l": [True, -n]} for n in range(values)],
        }
        count, again = counted(lambda: unflatten(*flatten(tree)))
        assert again == tree
        return count

    usual = taken(500, 500)
    assert taken(2_000, 2_000) < 4.2 * usual
    assert usual < 500 * 600
