"""A source is complete when it was read: nothing is read through it later, and nothing of it changes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import copy_of

from ckptconv.formats.detect import open_source
from ckptconv.formats.source import Defaults, Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import planned
from ckptconv.outputs.targets import Target
from ckptconv.plan import identify


def test_what_is_read_anyway_is_not_read_again(tmp_path: Path) -> None:
    checkpoint = copy_of("z3_bf16_w2", tmp_path)
    source = open_source(checkpoint)
    assert source.optimizer
    shutil.rmtree(checkpoint)
    states = planned(source, Target(str(tmp_path / "states"), "states"), Options())
    assert states.tensors


def test_the_id_of_a_plan_tells_every_input_and_setting_apart_and_not_their_order() -> None:
    known = identify([], {"a": 1, "b": 2}, "settings")
    assert identify([], {"b": 2, "a": 1}, "settings") == known
    others = ({"a": 3, "b": 2}, "settings"), ({"a": 1, "b": 3}, "settings"), ({"a": 1, "b": 2}, "others")
    assert len({known, *(identify([], inputs, settings) for inputs, settings in others)}) == 4


def test_a_source_is_checked_when_it_is_made_and_when_it_is_changed() -> None:
    sound: dict[str, Any] = {"format": "made", "family": "made", "path": "here", "weights": {}}
    wrong: list[dict[str, Any]] = [
        {"path": None},
        {"inputs": ["a"]},
        {"weights": [], "structured": False},
        {"part": -1},
        {"defaults": Defaults(grouping={"a": "b"}), "shards": ["c"]},
        {"companions": {"config.json": None}},
        {"defaults": Defaults("no dtype")},
        {"defaults": Defaults(shard_size=0)},
        {"files": {}},
    ]
    for fields in wrong:
        with pytest.raises((TypeError, ValueError), match="its"):
            Source(**{**sound, **fields})
        with pytest.raises((TypeError, ValueError), match="its"):
            Source(**sound)._replace(**fields)
    for name, default in Source._field_defaults.items():
        if default is not None:
            with pytest.raises(TypeError, match=f"^{name} of its Source"):
                Source(**{**sound, name: object()})
    assert len(Source._fields) <= 35
