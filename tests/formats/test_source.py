"""A source is complete when it was read: nothing is read through it later, and nothing of it changes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ckptconv_here, copy_of, done

from ckptconv.formats import detect
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
    assert len(Source._fields) <= 36


def test_states_are_refused_by_name_where_the_feature_that_finds_them_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "STATES", "absent")
    weights = {"w": torch.ones(2)}
    torch.save({"model": weights, "optimizer": {"state": {}, "param_groups": [{}]}}, tmp_path / "t.pt")
    (tmp_path / "step").mkdir()
    torch.save(weights, tmp_path / "step" / "pytorch_model.bin")
    (tmp_path / "step" / "optimizer.pt").write_bytes(b"")
    missing = "Finding them needs the feature absent, which is not installed"
    # In the same file, and in one next to the weights, which is noted although nothing asks for it.
    for name, is_noted in (("t.pt", False), ("step", True)):
        run = ckptconv_here("convert", tmp_path / name, "--optimizer", tmp_path / "states.safetensors")
        run.refused(5, missing, "Convert only the weights.")
        run = done(ckptconv_here("convert", tmp_path / name, tmp_path / f"{name}.safetensors"))
        assert (missing in run.out) is is_noted
