"""`--to universal`, of which `--universal` is another spelling."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cells import verified_here
from checkpoints import ckptconv_here, contents, done
from safetensors.torch import save_file

from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import CHECKPOINTS


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}, "m.safetensors")


def convert(*words: str) -> list[str]:
    return ["convert", "m.safetensors", *words]


def test_both_spellings_write_the_same() -> None:
    for place, words in (("said", ["--universal", "said/step"]), ("asked", ["asked/step", "--to", "universal"])):
        Path(place).mkdir()
        done(ckptconv_here(*convert(*words)))
    assert contents(Path("said")) == contents(Path("asked"))
    verified_here("m.safetensors", "asked/step")
    verified_here("m.safetensors", "--universal", "asked/step")


def test_it_is_planned_and_made_in_parts() -> None:
    assert "would" in done(ckptconv_here(*convert("x", "--to", "universal", "--dry-run"))).out
    assert not Path("x").exists()
    if "part" not in OPTIONS:
        return
    for part in ("0/2", "1/2"):
        done(ckptconv_here(*convert("x", "--to", "universal", "--part", part)))
    done(ckptconv_here("finish", "x"))
    verified_here("m.safetensors", "x", "--to", "universal")


def test_it_stands_beside_other_outputs_but_not_beside_one_of_its_own() -> None:
    done(ckptconv_here(*convert("x", "--to", "safetensors", "--universal", "u")))
    assert Path("x/model.safetensors").is_file()
    assert Path("u").is_dir()
    for to in ("universal", *CHECKPOINTS):
        ckptconv_here(*convert("y", "--to", to, "--universal", "z")).refused(2, "two different outputs")
    ckptconv_here(*convert("--to", "safetensors", "--universal", "z")).refused(2, "OUTPUT is missing")


def test_it_is_made_of_one_input_and_has_a_name() -> None:
    ckptconv_here(*convert("--to", "universal")).refused(2, "requires a directory as OUTPUT")
    for word in ("DeepSpeed", "zero3"):
        ckptconv_here(*convert("x", "--to", word)).refused(2, "Did you mean universal?")


def test_a_pointer_that_goes_back_or_to_another_series_is_named() -> None:
    Path("run").mkdir()
    for step, told in (
        ("run/step20", ""),
        ("run/step100", ""),
        ("run/step20", "latest_universal referred to step100, and now refers to step20, an older step:"),
        ("run/best", "latest_universal referred to step20, and now refers to best:"),
        ("run/13", "latest_universal referred to best, and now refers to 13:"),
        ("run/11", "latest_universal referred to 13, and now refers to 11, an older step:"),
    ):
        warned = done(ckptconv_here(*convert(step, "--to", "universal"))).err
        assert (told in warned, "now refers to" in warned) == (True, bool(told)), step
        assert Path("run/latest_universal").read_text() == Path(step).name


def test_a_pointer_of_another_program_is_said_to_stay() -> None:
    Path("run").mkdir()
    Path("run/latest_universal").write_text("step77")
    refused = ckptconv_here(*convert("run/step3", "--to", "universal")).refused(2, "which ckptconv did not write")
    assert "now refers to" not in refused
    assert Path("run/latest_universal").read_text() == "step77"
