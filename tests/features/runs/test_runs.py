"""The steps of a run: which there are, by names, and what markers say of them."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from effort import every
from saved_steps import SAVERS

from ckptconv.errors import UsageError
from ckptconv.features.runs.marks import marks_of
from ckptconv.features.runs.names import number_of
from ckptconv.features.runs.registered import EXTENTS, MARKING
from ckptconv.features.runs.run import run_at
from ckptconv.storage.location import Location

NAMES = {
    "step-100": 100,
    "global_step20": 20,
    "checkpoint-500": 500,
    "iter_0000100": 100,
    "epoch=3-step=1000.ckpt": 1000,
    "0300": 300,
    "ep3-ba1000-rank0.pt": 1000,
    "epoch_7": 7,
    "llama-7b": None,
    "checkpoint-7b": None,
    "step-40k": None,
    "resnet50": None,
    "model_v1": None,
    "13b": None,
    f"step-{'9' * 200}": None,
    "2024-01-02": None,
    "final": None,
}


@every("name", NAMES)
def test_the_number_of_a_step_is_what_its_name_tells(name: str) -> None:
    assert number_of(name) == NAMES[name]


def test_links_are_no_steps_and_what_they_lead_to_is_told(tmp_path: Path) -> None:
    run = SAVERS["torch"].run(tmp_path / "run", 1, 2)
    (run / "step_99").symlink_to("step_1")
    (run / "step_98").symlink_to(tmp_path)
    (run / "loop").symlink_to("loop")
    found = run_at(Location(str(run)))
    assert [step.name for step in found.steps] == ["step_1", "step_2"]
    assert found.links["step_99"] == "step_1"
    (run / "step_2" / "more").symlink_to(run)
    assert run_at(Location(str(run))).steps[1].links == ("step_2/more",)


def names_of(place: Path) -> list[str]:
    return [step.name for step in run_at(Location(str(place))).steps]


# Where several runs have their steps, below the directory that is given.
SEVERAL = {
    "directories": ("a", "b"),
    "directories with a folder each": ("a/checkpoints", "b/checkpoints"),
    "numbers": ("1", "2"),
    "two folders": ("checkpoints", "ckpt"),
}


@every("layout", SEVERAL)
def test_the_steps_of_several_runs_are_not_those_of_one(layout: str, tmp_path: Path) -> None:
    place = tmp_path / layout
    for name in SEVERAL[layout]:
        SAVERS["torch"].run(place / name, 1, 2)
    named = ", ".join(name.partition("/")[0] for name in SEVERAL[layout])
    with pytest.raises(UsageError, match=f"contains the steps of several runs: {named}."):
        run_at(Location(str(place)))


def saved(place: Path, *names: str) -> Path:
    """Save a model in each file, in a directory of its own where the name has no suffix."""
    for name in names:
        path = place / name if Path(name).suffix else place / name / "model.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weight": torch.ones(2)}, path)
    return place


# Names in one directory of several runs, and the series that they have.
OF_SEVERAL = {
    "files": (["vit_epoch_1.pt", "vit_epoch_2.pt", "resnet_epoch_11.pt"], ["resnet_epoch_*", "vit_epoch_*"]),
    "directories": (
        ["run_a-step-100", "run_a-step-200", "run_b-step-100", "run_b-step-200"],
        ["run_a-step-*", "run_b-step-*"],
    ),
    "files without a word": (["vit_1.pt", "vit_2.pt", "bert_1.pt", "bert_2.pt"], ["bert_*", "vit_*"]),
    "other numbers": (
        ["vit_l14_step_1.pt", "vit_l14_step_2.pt", "vit_l16_step_1.pt", "vit_l16_step_2.pt"],
        ["vit_l14_step_*", "vit_l16_step_*"],
    ),
    "rates": (["lr=0.1-step=1.ckpt", "lr=0.2-step=2.ckpt"], ["lr=0.1-step=*", "lr=0.2-step=*"]),
    "releases": (["llama-3.1_step_1.pt", "llama-3.2_step_2.pt"], ["llama-3.1_step_*", "llama-3.2_step_*"]),
    "steps and epochs": (["step_500", "epoch_1"], ["epoch_*", "step_*"]),
    "an optimizer": (["vit_1.pt", "optim_1.pt", "bert_2.pt", "optim_2.pt"], ["bert_*", "vit_*"]),
    "optimizers": (["a_1.pt", "a_optim_1.pt", "b_1.pt", "b_optim_1.pt", "b_2.pt", "b_optim_2.pt"], ["a_*", "b_*"]),
}


@every("case", OF_SEVERAL)
def test_steps_whose_names_differ_in_more_than_their_numbers_are_of_several_runs(case: str, tmp_path: Path) -> None:
    names, series = OF_SEVERAL[case]
    place = saved(tmp_path / "mixed", *names)
    with pytest.raises(UsageError, match="contains the steps of several runs") as raised:
        run_at(Location(str(place)))
    assert f"{', '.join(series)}." in raised.value.message
    assert f"'{place}/{series[0]}'" in raised.value.hint
    for name in series:
        start = name.partition("*")[0]
        assert names_of(place / name) == [step for step in names if step.startswith(start) and "optim" not in step]


# Names of the steps of one run that differ in more than one number.
OF_ONE = {
    "measured": ["epoch=1-val_loss=0.25.ckpt", "epoch=2-val_loss=0.125.ckpt", "epoch=2-val_loss=0.125-v1.ckpt"],
    "a step in an epoch": ["epoch=0-step=9.ckpt", "epoch=1-step=19.ckpt"],
    "a fixed width": ["model099000.pt", "model100000.pt"],
    "the average of some": ["model_1.pt", "ema_1.pt", "optim_1.pt", "model_2.pt", "optim_2.pt"],
    "unfinished": ["step_1", "step_2", "tmp_step_3"],
}


def test_a_save_that_orbax_has_begun_is_an_unfinished_step(tmp_path: Path) -> None:
    run = run_at(Location(str(saved(tmp_path, "1/model.pt", "2.orbax-checkpoint-tmp/model.pt"))))
    assert [(step.name, step.number, step.is_named_unfinished) for step in run.steps] == [
        ("1", 1, False),
        ("2.orbax-checkpoint-tmp", 2, True),
    ]


@every("case", OF_ONE)
def test_the_steps_of_one_run_may_differ_in_more_than_their_numbers(case: str, tmp_path: Path) -> None:
    run = run_at(Location(str(saved(tmp_path, *OF_ONE[case]))))
    steps = [*run.steps, *(other.step for other in run.beside)]
    assert {name for step in steps for name in step.names} == {*OF_ONE[case]}


@every("names", [("llama-7b.pt", "llama-13b.pt"), ("resnet18.pt", "resnet50.pt"), ("m_v1.pt", "m_v2.pt"), ("1b", "2b")])
def test_a_number_beside_a_letter_is_no_step(names: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no steps"):
        run_at(Location(str(saved(tmp_path, *names))))


def test_what_names_a_step_of_another_run_is_not_said_to_name_none(tmp_path: Path) -> None:
    place = saved(tmp_path, "a_step_1", "a_step_2", "b_step_1", "b_step_2")
    (place / "latest").write_text("b_step_1")
    (place / "best").symlink_to("b_step_2")
    assert run_at(Location(str(place / "a_step_*"))).naming == {}
    assert run_at(Location(str(place / "b_step_*"))).naming == {"latest": "b_step_1", "best": "b_step_2"}
    with pytest.raises(UsageError, match=r"contains no step whose name matches c\*\."):
        run_at(Location(str(place / "c*")))


def test_a_run_is_one_also_where_a_step_has_steps_in_it(tmp_path: Path) -> None:
    run = SAVERS["torch"].run(tmp_path, 1, 2)
    for step in ("step_1", "old"):
        SAVERS["torch"].run(run / step, 1, 2)
    assert names_of(run) == ["step_1", "step_2"]
    shutil.rmtree(run / "step_2")
    shutil.rmtree(run / "old")
    (run / "best").symlink_to("step_1")
    assert names_of(run) == ["step_1"]


def test_each_family_says_what_its_writers_leave_and_it_is_missed_where_several_steps_have_it(tmp_path: Path) -> None:
    markers = [marker for module in MARKING for marker in import_module(module).MARKERS]
    assert len({*markers}) == len(markers) > 3
    assert all(hasattr(import_module(module), "extent_of") for module in EXTENTS.values())
    for marker in markers:
        run = SAVERS["torch"].run(tmp_path / marker, 1, 2, 3)
        for number in (1, 2):
            (run / f"step_{number}" / marker).write_text("{}")
        marks = marks_of(run_at(Location(str(run))))
        assert [marks[f"step_{number}"].says for number in (1, 2, 3)] == [True, True, False]
        assert f"it lacks {marker}, which other steps have" in marks["step_3"].which
