"""The options of states: where they are written to, and what the option to read them was called."""

from __future__ import annotations

from pathlib import Path

from features.dcp.cases import checkpoint_of

import ckptconv

STEP = checkpoint_of("fsdp2_w2_nested")


def test_the_optimizer_goes_to_a_path(tmp_path: Path) -> None:
    ckptconv.convert(STEP, optimizer=tmp_path / "states", dtype="keep")
    assert (tmp_path / "states").is_dir()
