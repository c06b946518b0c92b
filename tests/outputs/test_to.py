"""`--to`: the kind of an output where its name does not say it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, ckptconv_here, contents, done
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv import UsageError
from ckptconv.options.table import OPTIONS
from ckptconv.outputs import kinds
from ckptconv.outputs.kinds import KINDS, NAMED

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(WEIGHTS, "m.safetensors")


def test_a_name_that_says_nothing_takes_any_kind_and_verify_knows_it_again() -> None:
    for to in NAMED:
        done(ckptconv_here("convert", "m.safetensors", f"of-{to}", "--to", to, "--verify"))
        done(ckptconv_here("verify", "m.safetensors", f"of-{to}", "--to", to))
        if to != "pt":  # one file has no manifest
            done(ckptconv_here("verify", "m.safetensors", f"of-{to}"))
    assert_same(torch.load("of-pt", weights_only=True), WEIGHTS)
    assert_same(load_file("of-safetensors/model.safetensors"), WEIGHTS)
    assert "Say with --to" in ckptconv_here("verify", "m.safetensors", "of-pt").refused(2, "of-pt is not an output")


def test_an_output_is_the_same_whether_its_name_or_to_says_its_kind() -> None:
    for to, name in (("pt", "x.pt"), ("safetensors", "x.safetensors"), ("safetensors", "x")):
        for place, words in (("said", []), ("asked", ["--to", to])):
            Path(place).mkdir(exist_ok=True)
            done(ckptconv_here("convert", "m.safetensors", f"{place}/{name}", *words))
        assert contents(Path("said")) == contents(Path("asked")), name


def test_a_name_of_another_kind_is_refused_and_nothing_is_written() -> None:
    before = contents(Path())
    for to in NAMED:
        for kind, other in KINDS.items():
            for ending in other.suffixes if kind not in NAMED[to] else ():
                if ending != ".ckpt" or to not in kinds.CHECKPOINTS:  # directories of Lightning end so
                    calls = [ckptconv.convert, *([] if to in kinds.CHECKPOINTS else [ckptconv.verify])]
                    for call in calls:
                        with pytest.raises(UsageError, match=f"x{ending} (ends in|is the name of a file)"):
                            call("m.safetensors", f"x{ending}", to=to)
    for name in ("x.json", "x.distcp", "x/"):
        with pytest.raises(UsageError, match="--to pt writes one file"):
            ckptconv.convert("m.safetensors", name, to="pt")
    assert contents(Path()) == before


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
    done(ckptconv_here("convert", "m.safetensors", "model", "--max-shard-size", "24"))
    done(ckptconv_here("convert", "model", "--to", "pt"))
    assert_same(torch.load("model.pt", weights_only=True), WEIGHTS)
    Path("m.pt").write_text("mine")
    ckptconv_here("convert", "m.safetensors", "--to", "pt").refused(2, "m.pt exists")
    for to in NAMED.keys() - {"safetensors", "pt"}:
        ckptconv_here("convert", "m.safetensors", "--to", to).refused(2, "needs an OUTPUT: a directory")


def test_parts_and_plans_are_of_the_kind() -> None:
    assert "would" in done(ckptconv_here("convert", "m.safetensors", "x", "--to", "pt", "--dry-run")).out
    assert not Path("x").exists()
    if "part" in OPTIONS:
        for part in ("0/2", "1/2"):
            done(ckptconv_here("convert", "m.safetensors", "of-pt", "--to", "pt", "--part", part))
        done(ckptconv_here("finish", "of-pt"))
        done(ckptconv_here("verify", "m.safetensors", "of-pt", "--to", "pt"))


def test_every_kind_is_named_in_the_help() -> None:
    assert [to for to in NAMED if to not in OPTIONS["to"].about] == []
    assert "Did" not in ckptconv_here("convert", "m.safetensors", "--to", "gguf").refused(2, "safetensors, pt")
    assert "Did" not in ckptconv_here("convert", "m.safetensors", "--to", "gptq").refused(2, "safetensors, pt")
    for word, meant in {"torch": "pt", "fsdp": "dcp", "PyTorch": "pt", "PT": "pt"}.items():
        if meant not in NAMED:
            continue
        ckptconv_here("convert", "m.safetensors", "--to", word).refused(2, f"Did you mean {meant}?")


def test_a_kind_whose_feature_is_missing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "NAMED", {to: names for to, names in NAMED.items() if to != "dcp"})
    monkeypatch.setattr(kinds, "ABSENT", {"dcp": "absent"})
    with pytest.raises(UsageError, match="to dcp needs the feature absent, which is not installed"):
        ckptconv.convert("m.safetensors", "x", to="dcp")
    ckptconv_here("convert", "m.safetensors", "x", "--to", "dcp").refused(2, "--to dcp needs the feature absent")
