"""DeepSpeed's files, written again with deflated members."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from checkpoints import ZERO, ckptconv_here
from features.compressed.test_compressed import deflated


@pytest.mark.parametrize("case", ["z3_bf16_w2", "z1_bf16_frozen_w2"])
def test_deflated_files_are_converted_alike(case: str, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(ZERO / case / "checkpoint", tmp_path / "checkpoint"))
    for path in checkpoint.rglob("*.pt"):
        os.replace(deflated(path, tmp_path / "packed"), path)
    outputs = []
    for number, source in enumerate((ZERO / case / "checkpoint", checkpoint)):
        output, states = tmp_path / f"{number}.safetensors", tmp_path / f"optimizer{number}.safetensors"
        run = ckptconv_here("zero-to-fp32", source, output, "--optimizer", states)
        assert run.code == 0, run.err
        outputs.append((output.read_bytes(), states.read_bytes()))
    assert outputs[0] == outputs[1]
