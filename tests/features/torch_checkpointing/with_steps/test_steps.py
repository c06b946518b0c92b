"""Runs whose steps are of torch_checkpointing."""

from __future__ import annotations

import shutil
from pathlib import Path

from checkpoints import ckptconv_here
from saved_steps import SAVERS


def test_what_is_being_written_has_a_name_that_says_so(tmp_path: Path) -> None:
    run = SAVERS["torch_checkpointing"].run(tmp_path / "run", 1)
    shutil.copytree(run / "step_1", run / "tmp_step_2")
    found = ckptconv_here("steps", run, "--json")
    assert found.code == 4
    assert found.json["last_good"] == str(run / "step_1")
    assert not found.json["steps"][1]["good"]
