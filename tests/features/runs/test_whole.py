"""Which steps of a run are whole, also of those that are not opened because they look like one that was."""

from __future__ import annotations

from pathlib import Path

from saved_steps import SAVERS

from ckptconv.features.runs.run import run_at
from ckptconv.features.runs.whole import Judged, judged, newest_good
from ckptconv.storage.location import Location


def judged_in(run: Path) -> dict[str, Judged]:
    return {known.step.name: known for known in judged(run_at(Location(str(run))))}


def test_a_step_that_looks_like_another_one_is_not_opened(tmp_path: Path) -> None:
    steps = judged_in(SAVERS["torch"].run(tmp_path / "run", 1, 2, 3))
    assert {name: (known.whole, known.like) for name, known in steps.items()} == {
        "step_1": (True, "step_3"),
        "step_2": (True, "step_3"),
        "step_3": (True, ""),
    }


def test_an_archive_whose_end_was_never_written_is_cut_short_although_its_size_is_right(tmp_path: Path) -> None:
    run = SAVERS["torch"].run(tmp_path / "run", 1, 2, 3)
    model = run / "step_1" / "model.pt"
    data = model.read_bytes()
    model.write_bytes(data[:-200] + bytes(200))
    known = judged_in(run)["step_1"]
    assert (known.whole, known.why) == (False, "step_1/model.pt is a zip archive without an end record")


def test_the_last_good_step_is_opened_where_the_one_that_it_looks_like_lacks_a_file(tmp_path: Path) -> None:
    run = SAVERS["trainer"].run(tmp_path / "run", 1, 2, 3)
    for number in (1, 2):
        (run / f"checkpoint-{number}" / "config.json").write_text("{}")
    assert not (run / "checkpoint-3" / "config.json").exists()
    # The header of the one that looks like the third step is damaged: only who opens it sees that.
    model = run / "checkpoint-2" / "model.safetensors"
    data = model.read_bytes()
    model.write_bytes(data[:8] + data[8:].replace(b"data_offsets", b"DATA_OFFSETS", 1))
    steps = judged_in(run)
    assert "it lacks" in steps["checkpoint-3"].why
    assert steps["checkpoint-2"].whole is False
    last = newest_good([*steps.values()])
    assert last is not None
    assert (last.step.name, last.like) == ("checkpoint-1", "")
