"""Runs whose steps are checkpoints of torch.distributed.checkpoint: which are read, and how far."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from checkpoints import Run, ckptconv_here
from features.dcp.cases import checkpoint_of
from saved_steps import SAVERS

from ckptconv.features.runs.run import run_at
from ckptconv.features.runs.whole import judged, newest_good
from ckptconv.storage.location import Location


def steps(run: Path, *options: str) -> Run:
    return ckptconv_here("steps", run, *options)


def test_a_step_of_the_names_and_sizes_of_another_is_not_opened_but_the_last_good_one_is(tmp_path: Path) -> None:
    run = SAVERS["dcp"].run(tmp_path / "run", 11, 12, 13)
    told = {step["name"]: step["like"] for step in steps(run, "--json").json["steps"]}
    assert told == {"step-11": "step-13", "step-12": "step-13", "step-13": ""}
    # Of the same size, and no metadata: whoever may be named as the last good one is looked into.
    for number in (12, 13):
        path = run / f"step-{number}" / ".metadata"
        path.write_bytes(b"\x80\x04" + b"N" * (path.stat().st_size - 3) + b".")
    assert steps(run, "--last").out == f"{run}/step-11\n"


def test_a_step_is_read_no_further_than_its_descriptions(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(checkpoint_of("hsdp_2x2"), run / "step-1")
    found = newest_good(judged(run_at(Location(str(run)))))
    assert found is not None
    assert found.weights > 0
    assert json.loads(steps(run, "--json").out)["steps"][0]["format"] == found.format
