"""The last good step of a run is the directory that the trainer wrote, with the configuration in it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import ZERO

import ckptconv


@pytest.mark.parametrize("options", [{}, {"for_hub": True}], ids=str)
def test_the_last_good_step_is_converted_as_by_its_path(options: dict[str, bool], tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number in (1, 2):
        step = shutil.copytree(ZERO / "z2_bf16_w2" / "checkpoint", run / f"checkpoint-{number}")
        (step / "config.json").write_text('{"model_type": "llama"}')
        (step / "tokenizer.json").write_text("{}")
    assert (step / "latest").exists()
    last = ckptconv.convert(run, tmp_path / "last", last_good=True, **options)
    named = ckptconv.convert(step, tmp_path / "named", **options)
    assert last.notes[0].startswith(f"Took {step}/global_step")
    assert last.notes[0].endswith(", the last good step by its sizes and markers.")
    assert last.notes[1:] == named.notes
    written = [{path.name for path in (tmp_path / name).iterdir()} for name in ("last", "named")]
    assert written[0] == written[1]
