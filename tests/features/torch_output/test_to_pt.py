"""`--to pt`: a `.pt` file where its name does not say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cells import VERIFY, verified_here, verifying
from checkpoints import assert_same, ckptconv_here, done
from safetensors.torch import save_file

import ckptconv
from ckptconv import UsageError
from ckptconv.options.table import OPTIONS

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(WEIGHTS, "m.safetensors")


@verifying
def test_what_it_is_is_not_seen_by_its_name_and_has_to_be_said_again() -> None:
    done(ckptconv_here("convert", "m.safetensors", "of-pt", "--to", "pt", *VERIFY))
    verified_here("m.safetensors", "of-pt", "--to", "pt")
    assert_same(torch.load("of-pt", weights_only=True), WEIGHTS)
    assert "Specify its kind with --to" in ckptconv_here("verify", "m.safetensors", "of-pt").refused(
        2, "of-pt is not an output"
    )


def test_a_name_of_another_kind_is_refused() -> None:
    for name in ("x.json", "x.distcp", "x/"):
        with pytest.raises(UsageError, match="--to pt writes one file"):
            ckptconv.convert("m.safetensors", name, to="pt")


def test_states_in_another_file_are_refused_and_the_way_with_one_file_is_told() -> None:
    ckptconv_here("convert", "m.safetensors", "m.pt", "--states", "m.safetensors").refused(
        2, "convert weights and states to one safetensors file"
    )
    torch.save({"model": WEIGHTS, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2, 3)}}, "epoch": 1}}, "t.pt")
    done(ckptconv_here("convert", "t.pt", "t.safetensors"))
    done(ckptconv_here("convert", "t.safetensors", "back.pt"))
    back = torch.load("back.pt", weights_only=True)
    assert_same(back["model"], WEIGHTS)
    assert (back["optimizer"]["state"].keys(), back["optimizer"]["epoch"]) == ({0}, 1)


def test_a_file_of_others_is_not_replaced_by_a_file_whose_name_does_not_say_what_it_is() -> None:
    Path("notes").write_text("mine")
    with pytest.raises(UsageError, match="notes exists"):
        ckptconv.convert("m.safetensors", "notes", to="pt")
    assert Path("notes").read_text() == "mine"
    ckptconv.convert("m.safetensors", "notes", to="pt", overwrite=True)
    ckptconv.convert("m.safetensors", "notes", to="pt")


def test_without_an_output_a_pt_file_is_beside_the_input() -> None:
    done(ckptconv_here("convert", "m.safetensors", "--to", "pt"))
    assert_same(torch.load("m.pt", weights_only=True), WEIGHTS)
    done(ckptconv_here("convert", "m.safetensors", "model", "--max-shard-size", "24B"))
    done(ckptconv_here("convert", "model", "--to", "pt"))
    assert_same(torch.load("model.pt", weights_only=True), WEIGHTS)
    Path("m.pt").write_text("mine")
    ckptconv_here("convert", "m.safetensors", "--to", "pt").refused(2, "m.pt exists")


def test_a_file_for_torch_load_is_not_split() -> None:
    for words in (("big.pt",), ("big", "--to", "pt")):
        run = ckptconv_here("convert", "m.safetensors", *words, "--max-shard-size", "1B")
        run.refused(2, "Give a directory of safetensors", "A file for torch.load is always one file.")


def test_parts_and_plans_are_of_the_kind() -> None:
    assert "would" in done(ckptconv_here("convert", "m.safetensors", "x", "--to", "pt", "--dry-run")).out
    assert not Path("x").exists()
    if "part" in OPTIONS:
        for part in ("0/2", "1/2"):
            done(ckptconv_here("convert", "m.safetensors", "of-pt", "--to", "pt", "--part", part))
        done(ckptconv_here("finish", "of-pt"))
        verified_here("m.safetensors", "of-pt", "--to", "pt")
