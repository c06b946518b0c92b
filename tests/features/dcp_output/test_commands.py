"""`safetensors2dcp` beside `convert` and `--to`, and the options of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cells import verifying
from checkpoints import ckptconv_here, done
from features.dcp.cases import checkpoint_of
from safetensors.torch import save_file

import ckptconv
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import KINDS, entry_of

STEP = checkpoint_of("fsdp2_w2_nested")
WEIGHTS = {"model.a": torch.arange(6.0).reshape(2, 3), "model.b": torch.tensor([1.0, -0.5]), "n": torch.arange(4)}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def succeeding(*arguments: object) -> None:
    done(ckptconv_here(*arguments))


def files(directory: Path) -> dict[Path, bytes]:
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*.*") if path.is_file()}


@verifying
def test_checkpoints_for_training_are_made_of_one_input(place: Path) -> None:
    """With the kinds of checkpoint that `safetensors2dcp` makes, whose outputs are the same."""
    torch.save({"s": {"x": torch.ones(3), "y": torch.zeros(2, 2)}, "epoch": 3}, "a.pt")
    save_file(WEIGHTS, "b.safetensors")
    for kind in (name for name in KINDS if entry_of(name).holds == "dcp"):
        succeeding("convert", "a.pt", kind, "--to", kind, "--chunks", "2")
        succeeding("safetensors2dcp", "a.pt", f"{kind}-strict", "--to", kind, "--chunks", "2")
        # All but the manifest, which says who made it.
        made, strict = files(place / kind), files(place / f"{kind}-strict")
        assert made.keys() == strict.keys()
        assert [name for name in made if made[name] != strict[name] and "manifest" not in str(name)] == [], kind
        succeeding("verify", "a.pt", kind)
    ckptconv_here("convert", "a.pt", "--to", "dcp").refused(2, "requires a directory as OUTPUT")


def test_the_report_counts_a_tensor_once_that_lies_in_several_files(place: Path) -> None:
    save_file({name: torch.ones(8, 8) for name in "abc"}, "m.safetensors")
    run = done(ckptconv_here("convert", "m.safetensors", "out", "--to", "dcp", "--chunks", "8"))
    assert ", 3 tensors)" in run.out


def test_states_beside_the_weights_are_named_with_the_option_that_takes_them() -> None:
    for words, option, other in (([], "--optimizer", "--states"), (["--to", "dcp"], "--states", "--optimizer")):
        said = done(ckptconv_here("convert", STEP, f"of{len(words)}", *words)).out
        assert f"{option} PATH" in said
        assert f"{other} PATH" not in said
    said = done(ckptconv_here("convert", STEP, "both", "--to", "dcp", "--states", STEP)).out
    assert "--states PATH" not in said


@verifying
def test_options_of_another_kind_are_said_which_kind_they_are_for() -> None:
    save_file(WEIGHTS, "m.safetensors")
    words = ["convert", "m.safetensors", "x"]
    if "zero_stage" in OPTIONS:
        ckptconv_here(*words, "--to", "dcp", "--zero-stage", "3").refused(2, "--to universal")
    ckptconv_here(*words, "--to", "safetensors", "--chunks", "3").refused(2, "--to dcp")
    Path("m.pt").touch()
    ckptconv_here("verify", "m.safetensors", "m.pt", "--to", "dcp").refused(2, "m.pt is a file name")
    ckptconv_here("pt2safetensors", "m.pt", "x", "--to", "dcp").refused(2, "ckptconv convert has --to")


@verifying
def test_parts_and_plans_are_of_the_kind() -> None:
    save_file(WEIGHTS, "m.safetensors")
    assert "would" in done(ckptconv_here("convert", "m.safetensors", "x", "--to", "dcp", "--dry-run")).out
    assert not Path("x").exists()
    if "part" in OPTIONS:
        for part in ("0/2", "1/2"):
            succeeding("convert", "m.safetensors", "y", "--to", "dcp", "--part", part)
        succeeding("finish", "y")
        succeeding("verify", "m.safetensors", "y", "--to", "dcp")


def test_strict_spellings_take_their_own_kinds() -> None:
    save_file(WEIGHTS, "m.safetensors")
    words = "safetensors2dcp", "m.safetensors", "x", "--to", "safetensors"
    said = ckptconv_here(*words).refused(2, "'safetensors'; it may be dcp")
    assert "universal" not in said


@verifying
def test_a_source_of_another_format_than_the_output_was_made_of_is_said_to_be_one(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    ckptconv.convert(tmp_path / "w.safetensors", tmp_path / "dcp", to="dcp")
    ckptconv.convert(tmp_path / "w.safetensors", tmp_path / "out")
    run = ckptconv_here("verify", tmp_path / "dcp", tmp_path / "out")
    run.refused(2, "torch.distributed.checkpoint", "converted from another format: safetensors", "verify SOURCE OUTPUT")
    assert "Use:" not in run.err
