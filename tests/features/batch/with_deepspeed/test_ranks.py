"""Several files of a run of DeepSpeed."""

from __future__ import annotations

import shutil
from pathlib import Path

from checkpoints import ZERO, ckptconv_here


def test_with_a_directory_of_outputs_each_of_them_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ZERO / "z3_bf16_exclfrozen_w2/checkpoint", run)
    files = sorted(run.rglob("*_states.pt"))
    ended = ckptconv_here("convert", *files, "--output-dir", tmp_path / "out", "--no-fsync", "--quiet")
    assert ended.code == 5
    assert ended.err.count("zero-to-fp32") == len(files) == 4
    assert not list((tmp_path / "out").rglob("*.safetensors"))
