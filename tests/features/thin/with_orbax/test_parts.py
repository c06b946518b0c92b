"""Parts of Orbax's steps that a reduced step would lack."""

from __future__ import annotations

import shutil
from pathlib import Path

from features.orbax.test_orbax import step_of
from features.thin.reduced import reduced


def test_the_number_of_a_step_is_named_before_it_goes(tmp_path: Path) -> None:
    for number in (1, 2):
        shutil.copytree(step_of("train-state"), tmp_path / "run" / str(number))
    plan = reduced(tmp_path / "run")
    assert (plan["action"], plan["lost"][-1]) == ("lessen", "step")
