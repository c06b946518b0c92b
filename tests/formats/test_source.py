"""A source is complete when it was read: nothing is read through it later, and nothing of it changes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import copy_of as copy_of_zero
from dcp_checkpoints import copy_of
from effort import every
from safetensors.torch import load_file

import ckptconv
from ckptconv.formats.source import Defaults, Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import planned
from ckptconv.outputs.targets import Target
from ckptconv.plan import identify

CASE = "fsdp2_w2_nested"


def test_no_field_can_be_set(tmp_path: Path) -> None:
    source = ckptconv.open(copy_of(CASE, tmp_path)).source
    for name in Source._fields:
        with pytest.raises(AttributeError):
            setattr(source, name, None)


@every("options", [Options(), Options(key="optim"), Options(key=".")], ids=["", "key", "all"])
def test_outputs_are_planned_when_the_checkpoint_is_gone(options: Options, tmp_path: Path) -> None:
    checkpoint = copy_of(CASE, tmp_path)
    source = ckptconv.open(checkpoint, key=options.key, states=True).source
    shutil.rmtree(checkpoint)
    made = planned(source, Target(str(tmp_path / "model"), "directory"), options)
    states = planned(source, Target(str(tmp_path / "states"), "states"), options)
    assert made.tensors
    assert states.tensors


def test_converting_and_verifying_leave_a_source_as_it_was(tmp_path: Path) -> None:
    checkpoint, output = copy_of(CASE, tmp_path), tmp_path / "model.safetensors"
    source = ckptconv.open(checkpoint, tag="none").source
    before = repr(source)
    report = ckptconv.convert(source, output, optimizer=tmp_path / "states.safetensors", spool_dir=tmp_path)
    ckptconv.verify(source, output, states=tmp_path / "states.safetensors")
    assert repr(source) == before
    assert any("--spool-dir" in note for note in report.notes)


def test_what_was_left_out_of_an_opened_source_is_read_for_who_asks(tmp_path: Path) -> None:
    checkpoint = copy_of(CASE, tmp_path)
    source = ckptconv.open(checkpoint).source
    assert source.optimizer is None
    for options in ({}, {"key": "optim"}):
        for given, name in ((source, "opened"), (checkpoint, "path")):
            place = tmp_path / f"{name}{len(options)}"
            place.mkdir()
            ckptconv.convert(given, place / "model.safetensors", optimizer=str(place / "states.safetensors"), **options)
        one, other = tmp_path / f"opened{len(options)}", tmp_path / f"path{len(options)}"
        for file in ("model.safetensors", "states.safetensors"):
            assert (one / file).read_bytes() == (other / file).read_bytes()
            assert load_file(one / file)


def test_weights_alone_cost_nothing_that_the_optimizer_needs(tmp_path: Path) -> None:
    checkpoint = copy_of(CASE, tmp_path)
    alone, together = ckptconv.open(checkpoint).source, ckptconv.open(checkpoint, states=True).source
    assert alone.bytes_read < together.bytes_read
    assert alone.inputs == together.inputs
    assert not alone.of_states.inputs


def test_what_is_read_anyway_is_not_read_again(tmp_path: Path) -> None:
    checkpoint = copy_of_zero("z3_bf16_w2", tmp_path)
    source = ckptconv.open(checkpoint).source
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
        {"grouping": {"a": "b"}, "shards": ["c"]},
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
