"""The states of a whole model do not go with a part of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from features.model_facts import models

import ckptconv
from ckptconv.errors import CkptconvError


def test_states_of_the_whole_do_not_go_with_a_part(tmp_path: Path) -> None:
    models.save_trained(tmp_path / "m.pt", {**models.ends(), **models.layer(0), **models.layer(1)})
    (tmp_path / "c.json").write_text("{}")
    for options, words in (
        ({"layers": "0"}, "A part of the weights was selected with --layers"),
        ({"config": tmp_path / "c.json"}, "--config supports .* weights, but.* next to the checkpoint"),
    ):
        with pytest.raises(CkptconvError, match=words):
            ckptconv.convert(tmp_path / "m.pt", tmp_path / "out", optimizer=tmp_path / "states", key="model", **options)
