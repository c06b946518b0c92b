"""States of optax, which no checkpoint for a torch trainer takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import ckptconv_here, contents, done

from ckptconv.outputs.kinds import CHECKPOINTS

STEP = Path(__file__).parent.parent / "data" / "train-state" / "checkpoint" / "step"
NAMED = ("optax optimizer states, 'mu', 'nu'", "Leave out --states to write only the weights.")


@pytest.mark.parametrize("to", CHECKPOINTS)
def test_no_checkpoint_for_torch_takes_them(to: str, tmp_path: Path) -> None:
    out = tmp_path / "iter_0000002"
    ckptconv_here("convert", STEP, out, "--to", to, "--states", STEP).refused(5, str(STEP), *NAMED)
    assert not contents(tmp_path)


def test_those_of_another_conversion_are_named_too(tmp_path: Path) -> None:
    model, states = tmp_path / "model.safetensors", tmp_path / "states.safetensors"
    done(ckptconv_here("convert", STEP, model, "--optimizer", states))
    ckptconv_here("convert", model, tmp_path / "out", "--to", "dcp", "--states", states).refused(5, str(states), *NAMED)
    assert not (tmp_path / "out").exists()
    done(ckptconv_here("convert", model, tmp_path / "out", "--to", "dcp"))
