"""The commands for maps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cells import VERIFY, verified_here, verifying
from checkpoints import ckptconv_here, done
from jsonschema import Draft202012Validator
from safetensors.torch import load_file

import ckptconv.cli
from ckptconv.options.table import OPTIONS

MAP = """about = "a test"
drop = ["*._extra_state"]
[[rule]]
one = "layers.{l}.qkv : (g (q + k) d) h"
other = ["l{l}.q : (g q d) h", "l{l}.k : (g k d) h"]
[sizes]
g = "groups"
k = 1
d = 2
"""


@pytest.fixture(autouse=True)
def _here(place: Path) -> None:
    (place / "my.toml").write_text(MAP)
    torch.save({"layers.0.qkv": torch.arange(48.0).reshape(12, 4), "layers.0._extra_state": torch.ones(2)}, "m.pt")


def test_show_prints_a_map_as_it_is(place: Path) -> None:
    assert done(ckptconv_here("maps", "show", "my.toml")).out == MAP


def test_check_says_what_a_map_has(place: Path) -> None:
    told = done(ckptconv_here("maps", "check", "my.toml")).out
    assert told == "my.toml: 1 rule, one ⇄ other; sizes: g, k, d\n"
    (place / "rest.toml").write_text(f'{MAP}[[rule]]\none = "layers.{{l}}.{{name}}"\nother = "x{{l}}.{{name}}"\n')
    told = done(ckptconv_here("maps", "check", "rest.toml")).out
    assert told.endswith("rest.toml:3, rule 1 takes precedence over rest.toml:10, rule 2\n")


def test_check_with_a_checkpoint_says_what_becomes_of_it(place: Path) -> None:
    run = ckptconv_here("maps", "check", "my.toml", "m.pt", "--size", "g=2", "-v")
    assert run.code == 0
    assert "m.pt: one → other yields 2 tensors\nl0.q ← layers.0.qkv\nl0.k ← layers.0.qkv\n" in run.out
    assert "left out, because the map my.toml drops them: 'layers.0._extra_state'" in run.err


@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
def test_check_with_a_reference_says_what_it_lacks(place: Path) -> None:
    q, k = torch.zeros(4, 4), torch.zeros(8, 4)
    torch.save({"l0.q": k, "l0.k": q}, place / "fits.pt")
    torch.save({"l0.q": k, "l0.k": q, "l1.q": k.clone()}, place / "more.pt")
    words = "maps", "check", "my.toml", "m.pt", "--size", "g=2", "--like"
    done(ckptconv_here(*words, "fits.pt"))
    ckptconv_here(*words, "more.pt").refused(1, "l1.q")


def test_what_is_printed_as_json_is_of_its_schema(place: Path) -> None:
    schema = json.loads((Path(ckptconv.cli.__file__).with_name("schemas") / "maps.json").read_text("utf-8"))
    for words, fields in (
        ("", set()),
        ("show my.toml", {"text"}),
        ("check my.toml", {"precedence", "source"}),
        ("check my.toml m.pt --size g=2", {"precedence", "source", "direction", "made_of", "warnings"}),
    ):
        found = ckptconv_here("maps", *words.split(), "--json").json
        Draft202012Validator(schema).validate(found)
        assert found.keys() == {"version", "ok", "command", "maps", *fields}, words
        assert len(found["maps"]) == 1 or not words
    assert found["made_of"] == {"l0.q": ["layers.0.qkv"], "l0.k": ["layers.0.qkv"]}


def test_what_a_check_finds_is_an_error(place: Path) -> None:
    ckptconv_here("maps", "check", "my.toml", "m.pt").refused(2, "or give --size g=NUMBER")
    for name, told in {
        "nothing": "The map 'nothing' does not exist",
        "./nothing.toml": "does not exist",
        "../": ("is a directory, and not a file"),
    }.items():
        ckptconv_here("maps", "check", name).refused(2, told)


def test_tensors_of_several_dtypes_become_one_if_they_are_given_the_same(place: Path) -> None:
    (place / "join.toml").write_text("[[rule]]\na = ['q : o h', 'k : o h']\nb = 'qk : h (o + o)'\n")
    q, k = torch.randn(4, 6).bfloat16(), torch.randn(4, 6)
    torch.save({"q": q, "k": k}, place / "mixed.pt")
    words = "convert", "mixed.pt", "joined.safetensors", "--map", "join.toml"
    ckptconv_here(*words).refused(2, "bfloat16, float32", "--dtype float32")
    done(ckptconv_here(*words, "--dtype", "float32", *VERIFY))
    assert torch.equal(load_file(place / "joined.safetensors")["qk"], torch.cat([q.float(), k]).T)


@verifying
def test_a_file_says_by_which_map_it_is_verified(place: Path) -> None:
    done(ckptconv_here("convert", "m.pt", "m.safetensors", "--map", "my.toml", "--size", "g=2"))
    verified_here("m.pt", "m.safetensors")
    torch.save({"layers.0.qkv": torch.zeros(12, 4)}, place / "m.pt")
    assert ckptconv_here("verify", "m.pt", "m.safetensors").code == 1


def test_the_name_of_a_map_in_the_place_of_a_command_is_met_with_show() -> None:
    ckptconv_here("maps", "megatron-llama").refused(2, "is a map, not a command", "ckptconv maps show megatron-llama")
    ckptconv_here("maps", "qwen3").refused(2, "is not a command of ckptconv maps", "megatron-qwen3", "maps show NAME")
    assert "ckptconv maps show" not in ckptconv_here("maps", "none").refused(2, "No such command 'none'")
