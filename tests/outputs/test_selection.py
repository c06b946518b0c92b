"""The structure record under --key, --include, --exclude, --strip-prefix, --rename, --dtype and --tied: it has what was
chosen, and nothing else."""

from __future__ import annotations

import base64
import re
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import VERIFY, verified_here
from checkpoints import ckptconv_here, done
from compare import assert_same
from effort import every
from reading import state_in
from safetensors import safe_open
from safetensors.torch import save_file
from trees import lazy

from ckptconv.cli.registered import COMMANDS
from ckptconv.outputs.hints import globs_like
from ckptconv.outputs.selection import NoKeyError, goal, subtree, untie
from ckptconv.structure import keymap
from ckptconv.structure.choice import Choice
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Stored
from ckptconv.tensors.moves import File


def test_names_that_would_be_one_are_both_told(tmp_path: Path) -> None:
    torch.save({"x": {"a": torch.ones(1), "b": torch.ones(1)}}, tmp_path / "x.pt")
    run = ckptconv_here("pt2safetensors", tmp_path / "x.pt", "--rename", "[ab]$=c")
    assert run.code == 2
    assert all(name in run.err for name in ("'x.a'", "'x.b'", "'x.c'"))


@every("output", ["x.safetensors", "x"])
def test_names_given_on_the_way_there_stand_in_the_file_and_in_the_record(output: str, tmp_path: Path) -> None:
    state = {"model.a": torch.ones(2), "model.b": torch.zeros(2)}
    torch.save(state, tmp_path / "x.pt")
    assert ckptconv_here("pt2safetensors", tmp_path / "x.pt", tmp_path / output, "--strip-prefix", "model.").code == 0
    file = tmp_path / output if output != "x" else tmp_path / "x" / "model.safetensors"
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == {"a", "b"}
    assert_same({"a": state["model.a"], "b": state["model.b"]}, state_in(tmp_path / output))


# ------------------------------------------------------------------------------- what is no tensor, and may be a secret

SECRET = "PLANTED-b7e1"


class Thing:
    """An object of a class that is known by name only."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def training() -> dict[str, Any]:
    """A file of a training, as Lightning writes them, with a secret in every place but the weights."""
    weight = torch.arange(6.0).reshape(2, 3)
    shared = [1, SECRET]
    return {
        "epoch": 3,
        "state_dict": OrderedDict({"a.weight": weight, "a.tied": weight, "a.count": torch.tensor(7)}),
        "optimizer_states": [{"state": {0: {"m": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "name": SECRET}]}],
        "callbacks": {f"{SECRET}{{}}": {"path": f"/{SECRET}"}},
        "hyper_parameters": {
            "api_key": SECRET,
            "lr": 0.5,
            SECRET: {},
            "long": SECRET * 20,
            "bytes": SECRET.encode() * 3,
            "nested": {"list": [{SECRET: SECRET}], "tuple": (SECRET, None), "set": {SECRET}},
            "array": np.frombuffer(SECRET.encode(), dtype="u1").copy(),
            "counts": Counter({SECRET: 2}),
            "last": deque([SECRET], maxlen=3),
            "thing": Thing(key=SECRET, **{SECRET: 1}),
            "shared": shared,
            "again": SECRET * 20,
        },
        "shared": shared,
        "again": {"long": SECRET * 20},
    }


def everywhere(place: Path) -> bytes:
    """All bytes of all files below `place`, as they are and as base64 is read."""
    data = b"".join(path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file())
    decoded = (base64.b64decode(text[: len(text) // 4 * 4]) for text in re.findall(rb"[A-Za-z0-9+/]{8,}", data))
    return data + b"".join(decoded)


ALONE = [
    ["--key", "state_dict"],
    ["--include", "state_dict.*"],
    ["--include", "state_dict.a.*", "--exclude", "*.count"],
    ["--exclude", "[!se]*", "--exclude", "shared*"],
    ["--exclude", "hyper_parameters", "--exclude", "[aco]*", "--exclude", "shared"],
    ["--no-structure"],
    ["--no-structure", "--include", "state_dict.*"],
]


@every(
    "options, output",
    [(options, output) for at, options in enumerate(ALONE) for output in ("x.safetensors", ("x", "x/parts")[at % 2])],
)
def test_what_was_not_chosen_is_in_no_file_that_is_written(options: list[str], output: str, tmp_path: Path) -> None:
    torch.save(training(), tmp_path / "x.pt")
    made = tmp_path / "made"
    made.mkdir()
    target = made / output.partition("/")[0]
    split = ["--max-shard-size", "30B"] if "/" in output else []
    options = [*options, *split]
    run = done(
        ckptconv_here(
            "pt2safetensors", tmp_path / "x.pt", target, *VERIFY, "--manifest", made / "m.json", *options, "--json"
        )
    )
    assert SECRET.encode() not in everywhere(made)
    assert run.json["recorded"] == (["epoch"] if "[" in "".join(options) else [])
    assert run.json["opaque"] == []
    verified_here(tmp_path / "x.pt", target, *options)
    back = state_in(target)
    weights = back if "--key" in options else back.get("state_dict", back)
    prefix = "state_dict." if "state_dict.a.weight" in weights else ""
    assert torch.equal(weights[f"{prefix}a.weight"], training()["state_dict"]["a.weight"])
    if "--no-structure" not in options:
        assert type(weights) is OrderedDict
        assert weights["a.weight"].data_ptr() == weights["a.tied"].data_ptr()
    assert SECRET.encode() not in everywhere(made)


def test_the_way_back_leaves_out_what_was_not_chosen(tmp_path: Path) -> None:
    torch.save(training(), tmp_path / "x.pt")
    assert ckptconv_here("pt2safetensors", tmp_path / "x.pt").code == 0
    assert SECRET.encode() in (tmp_path / "x.safetensors").read_bytes()
    made = tmp_path / "made"
    made.mkdir()
    for options in ALONE if "safetensors2pt" in COMMANDS else ():
        done(ckptconv_here("safetensors2pt", tmp_path / "x.safetensors", made / "y.pt", *VERIFY, *options))
        assert SECRET.encode() not in everywhere(made), options


def test_what_is_recorded_beside_the_tensors_is_told(tmp_path: Path) -> None:
    torch.save(training(), tmp_path / "x.pt")
    run = ckptconv_here("pt2safetensors", tmp_path / "x.pt")
    note = next(line for line in run.out.splitlines() if line.startswith("the structure record also contains values"))
    assert "under epoch, optimizer_states, callbacks, hyper_parameters, shared and 1 more" in note
    assert "--key state_dict" in note
    assert "--no-structure" in note
    told = ckptconv_here("pt2safetensors", tmp_path / "x.pt", "--json").json
    assert told["recorded"] == ["epoch", "optimizer_states", "callbacks", "hyper_parameters", "shared", "again"]
    assert told["opaque"]
    assert ckptconv_here("pt2safetensors", tmp_path / "x.pt", "-q").out == ""


def test_the_versions_of_a_state_dict_are_no_values_worth_a_word(tmp_path: Path) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
    torch.save({"state_dict": state}, tmp_path / "x.pt")
    assert ckptconv_here("pt2safetensors", tmp_path / "x.pt", "--json").json["recorded"] == []
    state._metadata["0"]["name"] = "mine"
    torch.save({"state_dict": state}, tmp_path / "x.pt")
    assert ckptconv_here("pt2safetensors", tmp_path / "x.pt", "--json").json["recorded"] == ["state_dict"]


def test_what_is_shared_is_whole_where_it_was_chosen(tmp_path: Path) -> None:
    """A value that is met first in a place that was not chosen is not lost in one that was."""
    betas, tags = (0.9, 0.99), {"x": ["y" * 100]}
    state = {
        "a": {"betas": betas, "tags": tags},
        "b": {"betas": betas, "tags": tags, "again": tags},
        "w": torch.ones(2),
    }
    torch.save(state, tmp_path / "x.pt")
    for options, expected in (
        (["--include", "w", "--include", "b.*"], {"b": state["b"], "w": state["w"]}),
        (["--exclude", "a", "--exclude", "*.again"], {"b": {"betas": betas, "tags": tags}, "w": state["w"]}),
    ):
        assert ckptconv_here("pt2safetensors", tmp_path / "x.pt", *options).code == 0
        back = state_in(tmp_path / "x.safetensors")
        assert_same(expected, back)
        if "again" in back["b"]:
            assert back["b"]["tags"] is back["b"]["again"]


def test_values_shared_many_times_are_written_a_few_times() -> None:
    """However often they are reached, and by however many names: two hundred lists, each twice in the next."""
    value: Any = ["z"]
    for _ in range(200):
        value = [value, value]
    tree = {"left": value, "right": [value], "w": lazy()}
    for include, exclude in ((["w"], []), (["w", "right*"], []), (["w", "right.*.0"], ["*.1.1"]), ([], ["*.1.1"])):
        structure = keymap.describe(tree, choice=Choice(include, exclude)).structure
        assert len(structure or "") < 20_000


@every("command", [command for command in ("pt2safetensors", "safetensors2pt") if command in COMMANDS])
def test_a_glob_that_excludes_nothing_is_told(command: str, tmp_path: Path) -> None:
    torch.save({"model": {"bias": torch.ones(2), "lr": 1}}, tmp_path / "x.pt")
    assert ckptconv_here("pt2safetensors", tmp_path / "x.pt").code == 0
    source, output = ("x.pt", "y.safetensors") if command == "pt2safetensors" else ("x.safetensors", "y.pt")
    run = ckptconv_here(command, tmp_path / source, tmp_path / output, "--exclude", "model.bais")
    assert run.code == 0
    assert "warning: --exclude 'model.bais' matches nothing. Did you mean 'model.bias'?" in run.err
    run = ckptconv_here(command, tmp_path / source, tmp_path / output, "--exclude", "model.lr")
    assert run.code == 0
    assert run.err == ""


# ----------------------------------------------------------------------------------------------------- what is no model


@every("state", [Thing(w=torch.ones(2)), {"a": Thing(w=torch.ones(2))}, {"a": Thing(b=b"x"), "n": 1}])
def test_tensors_inside_inert_objects_alone_are_no_success(state: Any, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "x.pt")
    run = ckptconv_here("pt2safetensors", tmp_path / "x.pt", tmp_path / "out", *VERIFY)
    assert run.code == 0
    assert "warning: " in run.err
    assert "not a usable model" in run.err
    assert "verified" not in run.out


@every("state", [{"a": Thing(b=b"x"), "n": 1}, {"epoch": 3}])
def test_a_file_without_a_tensor_becomes_no_model_next_to_it_unasked(state: Any, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "training_args.bin")
    run = ckptconv_here("convert", tmp_path / "training_args.bin")
    run.refused(2, "training_args.bin contains no tensor to write next to it", "with OUTPUT, a structure record")
    assert [path.name for path in tmp_path.iterdir()] == ["training_args.bin"]
    done(ckptconv_here("convert", tmp_path / "training_args.bin", tmp_path / "out"))


@every("words", [(), ("out",), ("out.safetensors",), ("out.pt",), ("--output-dir", "out")])
def test_an_object_without_a_tensor_becomes_no_model_under_any_name(words: tuple[str, ...], tmp_path: Path) -> None:
    torch.save(Thing(b=b"x"), tmp_path / "training_args.bin")
    paths = [word if word.startswith("--") else tmp_path / word for word in words]
    said = ckptconv_here("convert", tmp_path / "training_args.bin", *paths).err
    assert "training_args.bin contains no tensor: it is an object of " in said
    assert "test_selection.Thing" in said
    assert "give the directory as INPUT" in said
    assert [path.name for path in tmp_path.iterdir()] == ["training_args.bin"]


def test_an_object_beside_tensors_is_no_concern(tmp_path: Path) -> None:
    torch.save({"args": Thing(w=torch.ones(2)), "w": torch.ones(2)}, tmp_path / "x.pt")
    run = ckptconv_here("pt2safetensors", tmp_path / "x.pt", *VERIFY)
    assert run.err == ""
    assert ("verified" in run.out) is bool(VERIFY)


@every("output", ["x.safetensors", "x"])
def test_an_empty_state_dict_is_converted_and_verified(output: str, tmp_path: Path) -> None:
    torch.save({}, tmp_path / "x.pt")
    done(ckptconv_here("pt2safetensors", tmp_path / "x.pt", tmp_path / output, *VERIFY))
    verified_here(tmp_path / "x.pt", tmp_path / output)


def test_an_alias_of_an_alias_leads_to_the_name_that_is_stored() -> None:
    """The source says that c is b, and b has the bytes of a."""
    place = File("model.safetensors", 64, "")
    first, other = (Stored(place, offset, DTYPES["float32"], (2,), (1,)) for offset in (0, 8))
    assert untie({"a": first, "b": first, "c": other}, {"c": "b"}) == {"b": "a", "c": "a"}


@every(
    "dtype, usual, widened",
    [
        ("bfloat16", "float32", "float32"),
        ("float32", "float32", "float32"),
        ("float64", "float32", "float64"),
        ("float8_e4m3fn", "float32", "float8_e4m3fn"),
        ("int64", "int64", "int64"),
    ],
)
def test_what_is_only_widened_leaves_wider_floats_and_codes_of_8_bits(dtype: str, usual: str, widened: str) -> None:
    source = DTYPES[dtype]
    assert [goal(source, "float32", only).name for only in (False, True)] == [usual, widened]


def test_a_key_that_only_begins_names_leads_to_include(tmp_path: Path) -> None:
    torch.save({"model.a": torch.ones(2), "head": torch.ones(2)}, tmp_path / "flat.pt")
    run = ckptconv_here("convert", tmp_path / "flat.pt", tmp_path / "out", "--key", "model")
    run.refused(2, "The key 'model' does not exist", "Select these names with --include")
    done(ckptconv_here("convert", tmp_path / "flat.pt", tmp_path / "out", "--include", "model.*"))


def test_a_glob_without_names_suggests_one_for_the_names_below(tmp_path: Path) -> None:
    save_file({"a.tower.w": torch.ones(1), "head.w": torch.ones(1)}, tmp_path / "m.safetensors")
    run = ckptconv_here("convert", tmp_path / "m.safetensors", tmp_path / "o", "--exclude", "head")
    run.refused(2, "--exclude 'head' matches none of the 2 names.", "Did you mean 'head.*'?")
    run = ckptconv_here("convert", tmp_path / "m.safetensors", tmp_path / "p", "--include", "tower")
    run.refused(2, "Did you mean 'a.tower.*'?")


@every("option", ["--include", "--exclude"])
def test_a_glob_for_values_alone_does_not_match_those_beside_tensors(option: str, tmp_path: Path) -> None:
    """`optimizer` would take the groups, and not the states: who writes it means both."""
    torch.save({"w": torch.ones(2), "optimizer": {"m": torch.ones(2), "lr": 1}, "args": {"lr": 1}}, tmp_path / "x.pt")
    words = ("convert", tmp_path / "x.pt", tmp_path / "x.safetensors", option)
    ckptconv_here(*words, "optimizer").refused(2, f"{option} 'optimizer' matches none of the 2", "'optimizer.*'?")
    assert not (tmp_path / "x.safetensors").exists()
    done(ckptconv_here(*words, "args", option, "w"))


@every(
    "glob, near",
    [
        ("*.atn.*", "'*.attn.*'"),
        ("modle.*", "'model.*'"),
        ("q_proj.weight", "'model.layers.0.attn.q_proj.weight'"),
        ("layers.*", "'model.layers.*'"),
        ("weight", "'*.weight'"),
        ("model.layer.*", "'model.layers.*'"),
        ("*.[0-9].none", ""),
        ("", ""),
    ],
)
def test_a_glob_that_matches_nothing_is_respelled_if_that_matches(glob: str, near: str) -> None:
    names = ["model.layers.0.attn.q_proj.weight", "model.norm.weight"]
    hint = globs_like(glob, names)
    assert hint == f"Did you mean {near}?" if near else hint.startswith("The keys are 'model.layers.0")


def test_a_key_of_models_where_the_weights_are_at_the_top_is_left_out() -> None:
    flat = {"norm.weight": 1, "output.weight": 2}
    for tree, key, hint in (
        (flat, "model", "The weights are at the top. Leave out --key."),
        (flat, "other", "The keys are 'norm.weight', 'output.weight'."),
        ({"ema": flat, "step": 3}, "model", "The keys are 'ema', 'step'."),
        ({"net": flat}, "net.model", "The keys are 'norm.weight', 'output.weight'."),
        ({**flat, "model.a.weight": 3}, "model", "Names begin with model., but"),
    ):
        with pytest.raises(NoKeyError) as error:
            subtree(tree, key, "x.pt")
        assert error.value.hint.startswith(hint), key


@every("key, near", [("modle", "'model'"), ("ema_model", "'model' or 'ema'"), ("ema_weights", "'ema'")])
def test_a_key_that_does_not_exist_is_like_keys_that_are_words_of_it(key: str, near: str) -> None:
    tree = {"model": {"w": 1}, "ema": {"shadow": {"w": 2}}, "step": 3}
    with pytest.raises(NoKeyError) as error:
        subtree(tree, key, "x.pt")
    assert error.value.hint == f"Did you mean {near}?"


def test_a_key_that_begins_names_under_another_leads_to_these(tmp_path: Path) -> None:
    torch.save({"epoch": 1, "state_dict": {"ema.w": torch.ones(2), "model.w": torch.ones(3)}}, tmp_path / "x.pt")
    words = ("convert", tmp_path / "x.pt", tmp_path / "x.safetensors")
    meant = ("--key", "state_dict", "--include", "ema.*")
    said = "Names under state_dict begin with ema.: select these with --key state_dict --include 'ema.*'."
    ckptconv_here(*words, "--key", "ema").refused(2, "The key 'ema' does not exist at the top", said)
    assert done(ckptconv_here(*words, *meant, "--json")).json["tensors"] == 1


# ------------------------------------------------------------------------------------------------------ what is meant


def test_a_dry_run_says_what_each_renamed_tensor_was(tmp_path: Path) -> None:
    state = {"state_dict": {"model.a": torch.ones(1), "model.b": torch.zeros(1)}, "epoch": 1}
    torch.save(state, tmp_path / "x.pt")
    words = ("convert", tmp_path / "x.pt", tmp_path / "x.safetensors", "--dry-run")
    renaming = ("--key", "state_dict", "--strip-prefix", "model.", "--rename", "b=c")
    made_of = {"a": ["state_dict.model.a"], "c": ["state_dict.model.b"]}
    assert ckptconv_here(*words, *renaming, "--json").json["made_of"] == made_of
    assert "c ← state_dict.model.b\n" in done(ckptconv_here(*words, *renaming, "-v")).out
    assert ckptconv_here(*words, "--json").json["made_of"] == {}
    assert ckptconv_here(*words[:-1], *renaming, "--json").json["made_of"] == {}


def test_a_name_that_begins_with_a_dot_is_no_name(tmp_path: Path) -> None:
    save_file({"model.a": torch.ones(1)}, tmp_path / "x.safetensors")
    words = ("convert", tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    for renaming in (("--strip-prefix", "model"), ("--rename", "^model=")):
        ckptconv_here(*words, *renaming).refused(2, "leaves '.a', which begins with a dot, for 'model.a'")
    save_file({".a": torch.ones(1)}, tmp_path / "x.safetensors")
    assert ckptconv_here(*words, "--rename", "a=b").code == 0


def test_a_part_of_a_wrappers_prefix_is_met_with_the_whole(tmp_path: Path) -> None:
    weights = {f"module._orig_mod.{name}": torch.ones(1) for name in "ab"}
    torch.save(weights, tmp_path / "x.pt")
    torch.save({"state_dict": weights, "epoch": 1}, tmp_path / "trained.pt")
    told = "begins with 'module._orig_mod.', a model wrapper's prefix; "
    for name, key in (("x.pt", ()), ("trained.pt", ("--key", "state_dict"))):
        words = ("convert", tmp_path / name, tmp_path / "out", *key)
        half = done(ckptconv_here(*words, "--strip-prefix", "module.")).out
        assert f"{told}{' '.join((*key, '--strip-prefix'))} module._orig_mod. removes it." in half
        assert "begins with" not in done(ckptconv_here(*words, "--strip-prefix", "module._orig_mod.")).out


def test_a_pattern_of_another_language_is_met_with_the_right_one(tmp_path: Path) -> None:
    save_file({"a.0": torch.ones(1), "b": torch.ones(1)}, tmp_path / "x.safetensors")
    words = ("convert", tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    for options, advice in (
        (("--include", r"a\..*"), "The pattern is a glob, not a regular expression"),
        (("--include", "a.{0,1}"), "Repeat the option for each"),
        (("--include", "a.0,b"), "Repeat the option for each"),
        (("--rename", "s/a/b/"), "'a=b' replaces a with b."),
        (("--rename", "(a)=$1b"), r"Groups are \1, \2"),
    ):
        ckptconv_here(*words, *options).refused(2, advice)
    assert ckptconv_here(*words, "--rename", r"(a)=\1$").code == 0  # a $ before anything else is itself
    ckptconv_here(*words[:2], tmp_path / "y.gguf").refused(2, "GGUF is not written", "convert_hf_to_gguf.py")
