"""What has the number of a step and is none: outputs of this program, and further entries of one number."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_here, done
from effort import every
from saved_steps import SAVERS

from ckptconv.features.runs.beside import adds_words
from ckptconv.features.runs.run import run_at
from ckptconv.formats.registered import DESCRIBING
from ckptconv.storage.location import Location

SAVER = SAVERS["trainer"]


def convert(source: Path, output: str | Path, *options: str) -> None:
    done(ckptconv_here("convert", source, output, *options))


def counted(run: Path) -> list[str]:
    return [step.name for step in run_at(Location(str(run))).steps]


def beside(run: Path) -> dict[str, str]:
    return {other.step.name: other.why for other in run_at(Location(str(run))).beside}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return SAVER.run(tmp_path / "run", 6, 7)


def _directory(run: Path) -> Iterator[str]:
    convert(run / "checkpoint-7", f"{run}/checkpoint-7-safetensors/")
    yield "checkpoint-7-safetensors"


def _of_an_older_step(run: Path) -> Iterator[str]:
    yield from _directory(run)
    (run / "checkpoint-7-safetensors").rename(run / "checkpoint-9-safetensors")
    yield "checkpoint-9-safetensors"


def _word_before(run: Path) -> Iterator[str]:
    convert(run / "checkpoint-7", f"{run}/hf_checkpoint-7/")
    yield "hf_checkpoint-7"


def _other_word(run: Path) -> Iterator[str]:
    convert(run / "checkpoint-7", f"{run}/step-7/")
    yield "step-7"


def _files(run: Path) -> Iterator[str]:
    for name in ("checkpoint-7.safetensors", "checkpoint-7.pt", "step_7_bf16.safetensors"):
        convert(run / "checkpoint-7", run / name)
        yield name


def _cast(run: Path) -> Iterator[str]:
    convert(run / "checkpoint-7", f"{run}/checkpoint-7-bf16/", "--dtype", "bf16")
    convert(run / "checkpoint-7-bf16", f"{run}/checkpoint-7-bf16-again/")
    yield from ("checkpoint-7-bf16", "checkpoint-7-bf16-again")


OUTPUTS: Mapping[str, Callable[[Path], Iterator[str]]] = {
    "a directory": _directory,
    "a word before the name": _word_before,
    "another word": _other_word,
    "files": _files,
    "an output of an output": _cast,
}


@every("case", OUTPUTS)
def test_an_output_beside_a_step_of_its_number_is_no_step(case: str, tmp_path: Path) -> None:
    run = SAVER.run(tmp_path / "run", 6, 7)
    outputs = {*OUTPUTS[case](run)}
    assert counted(run) == ["checkpoint-6", "checkpoint-7"]
    assert beside(run) == dict.fromkeys(outputs, "an output of ckptconv")


def test_an_output_whose_name_adds_words_to_those_of_steps_is_none_of_them_whatever_its_number(run: Path) -> None:
    [*_of_an_older_step(run)]
    assert counted(run) == ["checkpoint-6", "checkpoint-7"]
    assert {*beside(run)} == {"checkpoint-9-safetensors"}


@pytest.mark.skipif(not DESCRIBING, reason="there are no virtual checkpoints")
def test_a_directory_with_a_virtual_checkpoint_of_a_step_is_no_step(run: Path) -> None:
    (run / "checkpoint-7-virtual").mkdir()
    convert(run / "checkpoint-7", run / "checkpoint-7-virtual" / f"model{next(iter(DESCRIBING))}")
    assert counted(run) == ["checkpoint-6", "checkpoint-7"]
    assert {*beside(run)} == {"checkpoint-7-virtual"}


def test_a_run_of_outputs_alone_has_steps(run: Path, tmp_path: Path) -> None:
    for name in ("checkpoint-{}-safetensors", "checkpoint-{}", "checkpoint-{}.safetensors"):
        place = tmp_path / name.format("n")
        place.mkdir()
        for number in (6, 7):
            end = "" if name.endswith(".safetensors") else "/"
            convert(run / f"checkpoint-{number}", f"{place}/{name.format(number)}{end}")
        assert counted(place) == [name.format(6), name.format(7)]
        assert not beside(place)


def test_a_step_with_an_output_in_it_stays_a_step(run: Path) -> None:
    convert(run / "checkpoint-7", f"{run}/checkpoint-7/hf/")
    shutil.copytree(run / "checkpoint-7", run / "checkpoint-7-best")
    assert counted(run) == ["checkpoint-6", "checkpoint-7"]
    assert beside(run) == {"checkpoint-7-best": "checkpoint-7 has the same step number"}


@every("name", ["checkpoint-7-best", "step_7_hf", "checkpoint-07", "a-checkpoint-7"])
def test_of_entries_of_one_number_one_is_a_step_and_the_others_are_named(name: str, tmp_path: Path) -> None:
    run = SAVER.run(tmp_path / "run", 6, 7)
    shutil.copytree(run / "checkpoint-7", run / name)
    assert len(counted(run)) == 2
    (step,) = {"checkpoint-7", name} & {*counted(run)}
    assert step == "checkpoint-7" or not adds_words(name, "checkpoint-7")
    assert beside(run) == {({"checkpoint-7", name} - {step}).pop(): f"{step} has the same step number"}


def test_of_files_of_one_number_the_step_is_the_one_whose_name_adds_no_words(tmp_path: Path) -> None:
    for name, size in (("vit_epoch_2.pt", 1), ("vit_epoch_2_best.pt", 2)):
        torch.save({"weight": torch.ones(size)}, tmp_path / name)
    assert counted(tmp_path) == ["vit_epoch_2.pt"]
    assert beside(tmp_path) == {"vit_epoch_2_best.pt": "vit_epoch_2.pt has the same step number"}


def test_an_output_that_was_changed_since_is_not_known_to_be_one(run: Path) -> None:
    convert(run / "checkpoint-7", f"{run}/checkpoint-7-hf/")
    shutil.copy(run / "checkpoint-7" / "optimizer.pt", run / "checkpoint-7-hf")
    assert beside(run) == {"checkpoint-7-hf": "checkpoint-7 has the same step number"}


def test_a_step_that_is_being_written_is_no_second_one_of_its_number(run: Path) -> None:
    SAVER.save(run / "tmp-checkpoint-7", 7)
    assert {*counted(run)} == {"checkpoint-6", "checkpoint-7", "tmp-checkpoint-7"}


def test_outputs_are_no_parts_of_a_step_of_files(tmp_path: Path) -> None:
    run = SAVERS["torch"].run(tmp_path / "made", 1)
    for number in (1, 2):
        for part in ("model", "optim"):
            shutil.copy(run / "step_1" / f"{part}.pt", tmp_path / f"{part}_{number}.pt")
    shutil.rmtree(run)
    convert(tmp_path / "model_2.pt", tmp_path / "model_2.safetensors")
    found = run_at(Location(str(tmp_path)))
    assert [step.names for step in found.steps] == [("model_1.pt", "optim_1.pt"), ("model_2.pt", "optim_2.pt")]
    assert beside(tmp_path) == {"model_2.safetensors": "an output of ckptconv"}
    convert(tmp_path / "model_2.pt", tmp_path / "model_2_bf16.safetensors", "--dtype", "bf16")
    assert beside(tmp_path)["model_2_bf16.safetensors"] == "an output of ckptconv"
    (tmp_path / "model_2_bf16.safetensors").unlink()
    shutil.copy(tmp_path / "model_2.safetensors", tmp_path / "model_1.safetensors")
    assert beside(tmp_path)["model_1.safetensors"] == "model_1.pt has the same step number"
    for number in (1, 2):
        (tmp_path / f"model_{number}.pt").unlink()
    assert [step.names for step in run_at(Location(str(tmp_path))).steps] == [
        ("model_1.safetensors", "optim_1.pt"),
        ("model_2.safetensors", "optim_2.pt"),
    ]


WORDS = {
    ("step-7-safetensors", "step-12"): True,
    ("step-7.pt", "step-7"): True,
    ("hf-step-7", "step-7"): True,
    ("Step_7_HF", "step_7"): True,
    ("step-7", "step-12"): False,
    ("step-7", "step-7.pt"): False,
    ("step-7.pt", "step-7.safetensors"): False,
    ("substep-7", "step-7"): False,
    ("step-7", "step-7-safetensors"): False,
}


@every("names", WORDS)
def test_a_name_adds_words_to_another_whatever_the_numbers(names: tuple[str, str]) -> None:
    assert adds_words(*names) is WORDS[names]
