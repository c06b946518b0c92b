"""The commands for maps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_here

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


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(MAP)
    torch.save(
        {"layers.0.qkv": torch.arange(48.0).reshape(12, 4), "layers.0._extra_state": torch.ones(2)}, tmp_path / "m.pt"
    )
    return tmp_path


def test_show_prints_a_map_as_it_is(place: Path) -> None:
    run = ckptconv_here("maps", "show", "my.toml")
    assert (run.code, run.out) == (0, MAP)


def test_check_says_what_a_map_has(place: Path) -> None:
    run = ckptconv_here("maps", "check", "my.toml")
    assert (run.code, run.out) == (0, "my.toml: 1 rule, one ⇄ other; sizes: g, k, d\n")


def test_check_with_a_checkpoint_says_what_becomes_of_it(place: Path) -> None:
    run = ckptconv_here("maps", "check", "my.toml", "m.pt", "--size", "g=2", "-v")
    assert run.code == 0
    assert "m.pt: one → other makes 2 tensors\nl0.q ← layers.0.qkv\nl0.k ← layers.0.qkv\n" in run.out
    assert "left out, as the map my.toml says: 'layers.0._extra_state'" in run.err


def test_check_with_a_reference_says_what_it_lacks(place: Path) -> None:
    q, k = torch.zeros(4, 4), torch.zeros(8, 4)
    torch.save({"l0.q": k, "l0.k": q}, place / "fits.pt")
    torch.save({"l0.q": k, "l0.k": q, "l1.q": k.clone()}, place / "more.pt")
    words = "maps", "check", "my.toml", "m.pt", "--size", "g=2", "--like"
    assert ckptconv_here(*words, "fits.pt").code == 0
    run = ckptconv_here(*words, "more.pt")
    assert run.code == 1
    assert "l1.q" in run.err


def test_what_a_check_finds_is_an_error(place: Path) -> None:
    run = ckptconv_here("maps", "check", "my.toml", "m.pt")
    assert run.code == 2
    assert "Give --size g=NUMBER" in run.err
    for name, told in {"nothing": "no map 'nothing'", "./nothing.toml": "does not exist", "../": "is no file"}.items():
        run = ckptconv_here("maps", "check", name)
        assert run.code == 2
        assert told in run.err


def test_verify_asks_for_the_map_of_a_single_file(place: Path) -> None:
    given = "--map", "my.toml", "--size", "g=2"
    assert ckptconv_here("convert", "m.pt", "m.safetensors", *given).code == 0
    ckptconv_here("verify", "m.pt", "m.safetensors").refused(1, "records a map", "Give the --map of the conversion")
    assert ckptconv_here("verify", "m.pt", "m.safetensors", *given).code == 0
