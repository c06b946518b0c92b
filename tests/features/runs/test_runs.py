"""The steps of a run: which there are, by names, and what markers say of them."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import pytest
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
    with pytest.raises(UsageError, match=f"has the steps of several runs: {named}."):
        run_at(Location(str(place)))


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
