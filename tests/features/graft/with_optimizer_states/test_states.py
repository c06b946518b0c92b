"""The states of a whole model do not go with what was grafted onto it."""

from __future__ import annotations

from pathlib import Path

import pytest
from features.model_facts import models

import ckptconv
from ckptconv.errors import CkptconvError


def test_states_of_the_whole_do_not_go_with_it(tmp_path: Path) -> None:
    models.save_trained(tmp_path / "m.pt", {**models.ends(), **models.layer(0)})
    models.save(tmp_path / "more", {"more": (2,)}, None)
    given = {"optimizer": tmp_path / "states", "key": "model", "graft": f"{tmp_path}/more:*"}
    with pytest.raises(CkptconvError, match="--graft"):
        ckptconv.convert(tmp_path / "m.pt", tmp_path / "out", **given)
