"""`--to`: the kind of an output where its name does not say it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cells import VERIFY, of_features, verified_here
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
        done(ckptconv_here("convert", "m.safetensors", f"of-{to}", "--to", to, *VERIFY))
        verified_here("m.safetensors", f"of-{to}", "--to", to)
        if to != "pt":  # one file has no manifest
            verified_here("m.safetensors", f"of-{to}")
    assert_same(load_file("of-safetensors/model.safetensors"), WEIGHTS)


def test_an_output_is_the_same_whether_its_name_or_to_says_its_kind() -> None:
    files = [("pt", "x.pt")] if "pt" in NAMED else []
    for to, name in (*files, ("safetensors", "x.safetensors"), ("safetensors", "x")):
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
                    calls = [ckptconv.convert, *([] if to in kinds.CHECKPOINTS else of_features("COMPARING_OUTPUTS"))]
                    for call in calls:
                        with pytest.raises(UsageError, match=f"x{ending} (ends in|is a file name)"):
                            call("m.safetensors", f"x{ending}", to=to)
    assert contents(Path()) == before


def test_a_directory_that_only_to_asks_for_needs_an_output() -> None:
    for to in NAMED.keys() - {"safetensors", "pt"}:
        ckptconv_here("convert", "m.safetensors", "--to", to).refused(2, "requires a directory as OUTPUT")


def test_every_kind_is_named_in_the_help() -> None:
    assert [to for to in NAMED if to not in OPTIONS["to"].about] == []
    listed = ", ".join(list(NAMED)[:2]) if len(NAMED) > 2 else " or ".join(NAMED)
    assert "Did" not in ckptconv_here("convert", "m.safetensors", "--to", "gguf").refused(2, listed)
    assert "Did" not in ckptconv_here("convert", "m.safetensors", "--to", "gptq").refused(2, listed)
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
