"""A run whose newest step was cut short behind its weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dist_checkpoint
from checkpoints import ckptconv_here, done
from safetensors.torch import load_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_weights_of_a_torn_step_are_converted_and_last_good_is_named_and_takes_the_one_before(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "out.safetensors"
    for number in (1, 2):
        state = {"model": {"w": torch.full((9,), float(number))}, "optimizer": {"exp_avg": torch.ones(50, 50)}}
        dist_checkpoint.save(state, checkpoint_id=run / f"step-{number}")
    (file,) = (run / "step-2").glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1000)
    said = done(ckptconv_here("convert", run, output)).err
    assert f"{file} lacks bytes of entries that were not converted" in said
    assert "--last-good selects the last complete step of a run" in said
    assert load_file(output)["w"][0] == 2
    assert "--last-good" not in done(ckptconv_here("convert", run / "step-2", output)).err
    done(ckptconv_here("convert", run, output, "--last-good"))
    assert load_file(output)["w"][0] == 1
