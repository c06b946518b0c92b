"""A source is complete when it was read: nothing is read through it later, and nothing of it changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cells import verified
from effort import every
from features.dcp.cases import copy_of
from safetensors.torch import load_file

import ckptconv
from ckptconv.formats.detect import open_source
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import planned
from ckptconv.outputs.targets import Target

CASE = "fsdp2_w2_nested"


def test_no_field_can_be_set(tmp_path: Path) -> None:
    source = open_source(copy_of(CASE, tmp_path))
    for name in Source._fields:
        with pytest.raises(AttributeError):
            setattr(source, name, None)


@every("options", [Options(), Options(key="optim"), Options(key=".")], ids=["", "key", "all"])
def test_outputs_are_planned_when_the_checkpoint_is_gone(options: Options, tmp_path: Path) -> None:
    checkpoint = copy_of(CASE, tmp_path)
    source = open_source(checkpoint, key=options.key, states=True)
    shutil.rmtree(checkpoint)
    made = planned(source, Target(str(tmp_path / "model"), "directory"), options)
    states = planned(source, Target(str(tmp_path / "states"), "states"), options)
    assert made.tensors
    assert states.tensors


def test_converting_and_verifying_leave_a_source_as_it_was(tmp_path: Path) -> None:
    checkpoint, output = copy_of(CASE, tmp_path), tmp_path / "model.safetensors"
    source = open_source(checkpoint)
    before = repr(source)
    report = ckptconv.convert(source, output, optimizer=tmp_path / "states.safetensors", spool_dir=tmp_path)
    verified(source, output, states=tmp_path / "states.safetensors")
    assert repr(source) == before
    assert any("--spool-dir" in note for note in report.notes)


def test_what_was_left_out_of_an_opened_source_is_read_for_who_asks(tmp_path: Path) -> None:
    checkpoint = copy_of(CASE, tmp_path)
    source = open_source(checkpoint)
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
    alone, together = open_source(checkpoint), open_source(checkpoint, states=True)
    assert alone.bytes_read < together.bytes_read
    assert alone.inputs == together.inputs
    assert not alone.of_states.inputs
