"""Values of a file in messages: short, printable, and never an error of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cells import verified
from checkpoints import ckptconv_here
from hypothesis import given
from hypothesis import strategies as st

import ckptconv
from ckptconv.pickles.nodes import Global, Opaque, Size, TorchConstant
from ckptconv.text import brief, printable

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.binary()
    | st.text(st.characters(exclude_categories=())) | st.integers(0, 40).map(lambda n: -(7 ** (10**4 + n)))
    | st.builds(Global, st.text(), st.text()) | st.builds(TorchConstant, st.text(), st.text()),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
)  # fmt: skip


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a.pt?X-Amz-Signature=s/e&exp=1", "https://host/a.pt?..."),
        ("sftp://me:secret@host/a.pt", "sftp://me:...@host/a.pt"),
        ("http://me:s?e@host/a.pt?sig=a:b", "http://me:...@host/a.pt?..."),
        ("tar://a.pt::https://host/all.tar?sig=a%3D", "tar://a.pt::https://host/all.tar?..."),
        ("abfs://container@account/a.pt", "abfs://container@account/a.pt"),
        ("http://host:80/a.pt", "http://host:80/a.pt"),
    ],
)
def test_passwords_and_signatures_of_urls_are_not_shown(url: str, shown: str) -> None:
    for text in ("{}", "{}: torch zip archive", "{} does not exist.", "from {}, and {}.", '"input": "{}", "x": "?"'):
        assert printable(text.replace("{}", url)) == text.replace("{}", shown)


@given(values, st.integers(10, 100))
def test_any_value_is_shown_short_and_printable(value: object, limit: int) -> None:
    shown = brief(value, limit)
    assert 0 < len(shown) <= limit
    assert shown.isprintable()
    shown.encode()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (7, "7"),
        (-1, "-1"),
        (True, "True"),
        (1 << 479_999, "2^479999 or more"),
        (-(1 << 100_000), "-2^100000 or more"),
        ("a\x1b[31m\n", r"'a\x1b[31m\n'"),
        ("\ud800", r"'\ud800'"),
        ("\u202eabc", r"'\u202eabc'"),
        ("x" * 10**6, "'" + "x" * 58 + "…"),
        (b"\xff", r"b'\xff'"),
        ((), "()"),
        ((1,), "(1,)"),
        ((2, 3), "(2, 3)"),
        ([2, "a"], "[2, 'a']"),
        (Size((2, 3)), "(2, 3)"),
        (tuple(range(100)), "(0, 1, 2, 3, 4, 5, 6, 7, …)"),
        (((((1,),),),), "((tuple,),)"),
        (Global("a.b", "c\x1b"), r"a.b.c\x1b"),
        ({}, "dict"),
        (Opaque(Global("a", "b")), "Opaque"),
    ],
    ids=lambda value: "",
)
def test_what_is_shown(value: object, shown: str) -> None:
    assert brief(value) == shown


def test_a_report_is_an_object_as_its_command_prints_it(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    report = ckptconv.convert(tmp_path / "x.pt", tmp_path / "x.safetensors", fsync=False)
    reports = verified(tmp_path / "x.pt", tmp_path / "x.safetensors")
    for command, shown in (("convert", report), *(("verify", verification) for verification in reports)):
        printed = ckptconv_here(command, tmp_path / "x.pt", tmp_path / "x.safetensors", "--json").json
        assert json.loads(shown.to_json()) == json.loads(json.dumps(shown.to_dict()))
        assert shown.to_dict().keys() <= printed.keys(), command
