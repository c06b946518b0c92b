"""The states of a whole model do not go with the first rows of its vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from features.model_facts import models

import ckptconv
from ckptconv.errors import CkptconvError


def test_states_of_the_whole_do_not_go_with_it(tmp_path: Path) -> None:
    models.save_trained(tmp_path / "m.pt", {**models.ends(), **models.layer(0)})
    with pytest.raises(CkptconvError, match="--vocab"):
        ckptconv.convert(tmp_path / "m.pt", tmp_path / "out", optimizer=tmp_path / "states", key="model", vocab=3)
