"""The key mapper: names that people can read, and a record that is data, in every language."""

from __future__ import annotations

import copy
import itertools
import json
import pathlib
import re
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from checkpoints import ckptconv_here, done
from effort import every, examples
from hypothesis import given
from processes import calls, counted
from records import read_by_the_book, record
from safetensors.torch import load_file, save_file
from trees import lazy, trees, view

from ckptconv.errors import UsageError
from ckptconv.structure.keymap import describe, flatten, remap
from ckptconv.structure.reading import claimed_equal, tensor_names
from ckptconv.structure.record import plain_record
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor, Tagged, TensorFacts


def flattened(tree: Any) -> tuple[dict[str, Any], str | None]:
    """What `flatten` gives: names and a record that are fit for a file, and fit each other."""
    flat, structure = flatten(tree)
    for name, tensor in flat.items():
        assert name != "__metadata__"
        name.encode()
        assert not isinstance(tensor, Tagged)
    if structure is not None:
        structure.encode()
        assert json_depth(structure) <= 100
        assert tensor_names(structure) == flat.keys()
    return flat, structure


def json_depth(text: str) -> int:
    brackets = re.findall(r"[\[{\]}]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text))
    return max(itertools.accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)


# ------------------------------------------------------------------------------------------------- names for people


def test_a_name_is_the_path_joined_with_dots() -> None:
    tree = {
        "model": {"layers": [{"weight": lazy()}, {"weight": lazy()}]},
        "optimizer": {"state": {7: {"step": lazy()}}},
    }
    assert list(flatten(tree)[0]) == ["model.layers.0.weight", "model.layers.1.weight", "optimizer.state.7.step"]


def test_names_that_collide_are_told_apart_by_a_suffix() -> None:
    tree = {"a.b": lazy(), "a": {"b": lazy()}, "a.b~2": lazy()}
    flat, _ = flattened(tree)
    assert list(flat) == ["a.b", "a.b~2", "a.b~2~2"]
    assert flat["a.b"] is tree["a.b"]


def test_names_depend_on_nothing_but_the_tree() -> None:
    script = (
        "from ckptconv.structure.keymap import flatten; from ckptconv.tensors.lazy import *\n"
        "from ckptconv.tensors.dtypes import DTYPES\n"
        "t = [Inline(bytes([n]), DTYPES['uint8'], (1,)) for n in range(4)]\n"
        "tree = {'s': {'b', 'a', 'c', 1, (2, 'x'), None}, 'x': {'y': t[0]}, 'x.y': t[1], ('k', 1): t[2], 1.5: t[3]}\n"
        "print(flatten(tree))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


def test_names_that_collide_take_no_more_work_than_others() -> None:
    def tree(count: int, words: str) -> Any:
        return {"a": [{"": lazy(shape=())}], "a.0": [{"": lazy(shape=())}]} | {
            ("k", n, words): lazy(shape=()) for n in range(count)
        }

    long = "long enough for its words to be cut short " * 20
    taken, (flat, _) = counted(lambda: flatten(tree(2_000, long)))
    assert len(flat) == 2_002
    assert taken < 1.5 * calls(lambda: flatten(tree(2_000, "short")))
    assert taken < 6 * calls(lambda: flatten(tree(400, long)))


def test_a_tensor_alone_has_a_name_too() -> None:
    flat, _ = flattened(lazy())
    assert list(flat) == ["tensor"]


def test_the_name_that_safetensors_keeps_for_itself_is_not_given() -> None:
    flat, structure = flattened({"__metadata__": lazy()})
    assert list(flat) == ["__metadata__~2"]
    assert structure is not None


def test_an_empty_key_is_an_empty_name_which_safetensors_allows() -> None:
    flat, structure = flattened({"": lazy()})
    assert list(flat) == [""]
    assert structure is None


def test_lone_surrogates_are_replaced_in_names() -> None:
    flat, _ = flattened(dict.fromkeys(["a\ud800"], lazy()) | dict.fromkeys(["a\udfff"], lazy()))
    assert list(flat) == ["a\ufffd", "a\ufffd~2"]


def test_long_paths_are_cut_so_that_names_do_not_grow_with_depth() -> None:
    tree: Any = lazy()
    for _ in range(2000):
        tree = {"key": tree}
    flat, _ = flattened({"a": tree, "b": {"x" * 10_000: lazy()}})
    assert all(len(name) < 600 for name in flat)


def test_a_long_key_of_a_plain_dict_is_its_name_uncut() -> None:
    key = "k" * (64 << 10)
    flat, structure = flattened({key: lazy()})
    assert list(flat) == [key]
    assert structure is None


# ------------------------------------------------------------------------------------------------ without a record


def test_a_plain_state_dict_in_file_order_needs_no_record() -> None:
    tree = {"b": lazy("int64"), "a": lazy("float32"), "c": lazy("float32"), "flag": lazy("bool")}
    assert flattened(tree)[1] is None


def test_a_plain_state_dict_in_another_order_has_a_record_unless_order_does_not_matter() -> None:
    tree = {"b": lazy(), "a": lazy()}
    assert flattened(tree)[1] is not None
    flat, structure = flatten(tree, keep_order=False)
    assert structure is None
    assert list(flat) == ["b", "a"]


def test_the_empty_dict_needs_no_record() -> None:
    assert flatten({}) == ({}, None)


@every(
    "tree",
    [
        OrderedDict(a=Inline(b"x", DTYPES["uint8"], (1,))),
        {"a": [Inline(b"x", DTYPES["uint8"], (1,))]},
        {1: Inline(b"x", DTYPES["uint8"], (1,))},
        {"a": Inline(b"x", DTYPES["uint8"], (1,)), "b": 1},
        {"a": {}},
        {"a": Tagged(Inline(bytes(4), DTYPES["float32"], (1,)), TensorFacts(kind="parameter"))},
        {"a": Tagged(Inline(bytes(4), DTYPES["float32"], (1,)), TensorFacts(requires_grad=True))},
    ],
)
def test_whatever_is_not_a_plain_state_dict_has_a_record(tree: Any) -> None:
    assert flattened(tree)[1] is not None


def test_facts_that_a_file_needs_no_telling_are_no_reason_for_a_record() -> None:
    alone = view("0", 5, (2, 3), (3, 1))
    flat, structure = flatten({"a": alone})
    assert structure is None
    assert flat == {"a": alone.tensor}


@every("tagged", [False, True])
def test_tensors_with_the_same_bytes_have_a_record(tagged: bool) -> None:
    tensor = lazy()
    for again in (tensor, copy.copy(tensor)):
        assert describe({"a": tensor, "b": again}, tagged=tagged).structure is not None


def test_plain_record_keeps_the_keys_and_the_order_of_a_plain_dict() -> None:
    tree = {"b": lazy(), "a": lazy()}
    record = plain_record(tree)
    assert json.loads(record)["root"] == ["dict", "b", {}, "a", {}]
    renamed = remap(record, {"b": "x"})
    assert json.loads(renamed or "")["root"] == ["dict", "b", {"name": "x"}, "a", {}]


def test_no_record_stays_no_record() -> None:
    assert remap(None, {"a": "b"}) is None


# ------------------------------------------------------------------------------------------------------- the record


def test_the_record_of_a_small_tree_reads_like_the_tree() -> None:
    base = view("0", 0, (4,), (1,))
    tree = OrderedDict(
        lr=0.1, step=3, layers=[lazy(), base], tied=view("0", 2, (2,), (1,), kind="parameter"), betas=(0.9, None)
    )
    _, structure = flatten(tree)
    assert json.loads(structure or "") == {
        "version": 1,
        "root": [
            "odict",
            None,
            *("lr", ["float", "0.1"]),
            *("step", 3),
            *("layers", ["list", {}, {"storage": [0, 0]}]),
            *("tied", {"kind": "parameter", "requires_grad": False, "storage": [0, 2]}),
            *("betas", ["tuple", ["float", "0.9"], None]),
        ],
        "storages": [[4000, "float32"]],
    }


def test_only_what_occurs_twice_goes_into_the_table() -> None:
    shared: list[Any] = []
    _, structure = flatten({"a": shared, "b": shared, "c": [], "d": "x" * 100, "e": ["x" * 100, "y" * 100]})
    record = json.loads(structure or "")
    assert record["nodes"] == [["list"], "x" * 100]
    assert record["root"][:5] == ["dict", "a", ["@", 0], "b", ["@", 0]]


def test_a_reader_made_from_the_document_finds_every_tensor() -> None:
    long = "k" * 100
    deep: Any = lazy()
    for _ in range(70):
        deep = [deep]
    tree = {
        "a": {"b": [lazy(), (lazy(), 1.5)]},
        "a.b": {0: lazy(), "0": lazy()},
        long: {long: lazy(), "z": {long: {long: lazy()}}},
        "shared": [[lazy()]] * 2,
        "deep": deep,
        "": {"": lazy()},
    }
    flat, structure = flatten(tree)
    numbers = {id(tensor): number for number, tensor in enumerate(flat.values())}

    def numbered(node: Any) -> Any:
        if isinstance(node, (LazyTensor, torch.Tensor)):
            return ("tensor", numbers[id(node)] if isinstance(node, LazyTensor) else int(node))
        if isinstance(node, dict):
            return {key: numbered(value) for key, value in node.items()}
        return type(node)(map(numbered, node)) if isinstance(node, (list, tuple)) else node

    again = read_by_the_book({name: torch.tensor(number) for number, name in enumerate(flat)}, structure)
    assert numbered(again) == numbered(tree)


def test_shared_containers_cost_what_they_weigh_and_not_what_they_unfold_to() -> None:
    tree: Any = [lazy()]
    for _ in range(200):
        tree = [tree, tree]
    flat, structure = flattened(tree)
    assert len(flat) == 1
    assert len(structure or "") < 10_000


def test_a_long_text_in_many_places_is_written_once() -> None:
    text, data, number = "x" * 100_000, b"y" * 100_000, 7**40_000
    tree = [[text, data, number, {text: 1, data: 2, "n": number}] for _ in range(100)]
    _, structure = flattened(tree)
    assert len(structure or "") < 400_000


def test_a_long_key_over_many_tensors_is_not_repeated_in_their_names() -> None:
    key = "é" * 100_000
    flat, structure = flatten([{key: lazy(), "inner": {key: {"a": lazy()}}} for _ in range(1000)])
    assert sum(map(len, flat)) < 1_000_000
    assert len(structure or "") < 1_500_000


# ------------------------------------------------------------------------------------------------------------ scale


def test_a_record_takes_less_than_100_bytes_a_tensor() -> None:
    state = OrderedDict(
        (
            f"model.layers.{n // 300}.mlp.experts.{n % 300}.gate_up_proj.weight",
            view("s", 6 * n, (2, 3), (3, 1), nbytes=1 << 40),
        )
        for n in range(110_000, 120_000)
    )
    _, structure = flatten(state)
    assert len(structure or "") < 100 * 10_000
    optimizer = {"state": {n: {"step": lazy(), "exp_avg": lazy(), "exp_avg_sq": lazy()} for n in range(30_000, 33_000)}}
    _, structure = flatten(optimizer)
    assert len(structure or "") < 25 * 9_000


def test_names_that_a_record_gives_to_one_object_are_told_where_both_have_a_tensor() -> None:
    shared = lazy()
    _, record = flatten({"a": shared, "b": shared, "c": lazy()})
    assert [*claimed_equal({"a": 1, "b": 2, "c": 3}, record)] == [("b", 1, 2)]
    assert not [*claimed_equal({"a": 1, "c": 3}, record)]


@examples(70)
@given(trees)
def test_names_and_record_of_any_tree_fit_each_other(tree: Any) -> None:
    flattened(tree)


def test_live_objects_are_refused_by_name_where_their_feature_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ckptconv.features.live_objects.tensors", None)
    with pytest.raises(UsageError, match=r"\(Tensor\) needs the feature live_objects, which is not installed"):
        flatten({"a": torch.ones(2)})
    flattened({"a": lazy(), "b": [1, None]})


def test_a_record_is_refused_by_name_where_the_feature_that_reads_it_is_not_installed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ckptconv.features.unflattening.decoder", None)
    path, output = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    save_file({"w": torch.ones(2)}, path, {"ckptconv.structure": record(["list", {"name": "w"}])})
    run = ckptconv_here("convert", path, output)
    run.refused(5, "needs the feature unflattening, which is not installed", "--no-structure")
    done(ckptconv_here("convert", path, output, "--no-structure"))
    assert list(load_file(output)) == ["w"]
