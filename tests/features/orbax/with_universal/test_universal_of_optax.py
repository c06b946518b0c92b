"""States of optax, from which DeepSpeed cannot go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import ckptconv_here, contents, done

STEP = Path(__file__).parent.parent / "data" / "train-state" / "checkpoint" / "step"


@pytest.mark.parametrize("stage", [(), ("--zero-stage", "1"), ("--zero-stage", "3")])
def test_a_universal_checkpoint_starts_without_them(stage: tuple[str, ...], tmp_path: Path) -> None:
    asked = ("convert", STEP, tmp_path / "u", "--to", "universal", *stage)
    run = ckptconv_here(*asked)
    run.refused(5, str(STEP), "optax optimizer states, 'mu', 'nu'", "Use --fresh-optimizer to start with zero")
    assert not contents(tmp_path)
    assert "starts with zero moments at step 0" in done(ckptconv_here(*asked, "--fresh-optimizer")).out
