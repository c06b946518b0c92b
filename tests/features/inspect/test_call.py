"""The call `inspect`: the same as the command, as objects."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import opened, trained
from checkpoints import ckptconv_here

import ckptconv
from ckptconv import Summary
from ckptconv.features.inspect.page import page_of
from ckptconv.formats.detect import open_source

PRINTED = {"version": 1, "ok": True, "command": "inspect"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.pt"
    tied = torch.tensor([1.0, float("nan"), 0.0])
    torch.save({"a": {"x": tied, "y": tied}, "b": torch.arange(6).reshape(2, 3), "epoch": 3}, path)
    return path


def test_an_error_does_not_say_that_nothing_was_written(model: Path) -> None:
    model.write_bytes(model.read_bytes()[:-40])
    with pytest.raises(ckptconv.CorruptError) as broken:
        ckptconv.inspect(model)
    assert "written" not in broken.value.message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, []),
        ({"stats": True}, ["--stats"]),
        ({"as_": torch.bfloat16, "max_shard_size": "1KB"}, ["--as", "bf16", "--max-shard-size", "1KB"]),
        ({"include": "*x*"}, ["--include", "*x*"]),
        ({"key": "."}, ["--key", "."]),
    ],
)
def test_it_is_what_the_command_prints(options: dict[str, Any], words: list[str], model: Path) -> None:
    for path in (model, *trained()):
        if "include" in options and path != model:
            continue
        printed = json.loads(ckptconv_here("inspect", path, "--json", *words).out)
        found = ckptconv.inspect(path, **options)
        assert {**PRINTED, **found.to_dict()} == printed
        assert {**PRINTED, **json.loads(found.to_json())} == printed


def test_it_is_objects(model: Path) -> None:
    found = ckptconv.inspect(model, stats=True, as_="fp16")
    assert isinstance(found, Summary)
    assert {each.name: each.shape for each in found.tensors} == {"a.x": (3,), "a.y": (3,), "b": (2, 3)}
    assert found.totals["float32"].bytes == 12
    assert found.aliases == {"a.y": "a.x"}
    assert found.not_finite == ["a.x"]
    assert [(each.name, each.stats.nan) for each in found.tensors if each.stats] == [("a.x", 1), ("a.y", 1), ("b", 0)]
    assert found.conversion is not None
    assert found.conversion.dtype == "float16"
    assert [module.name for module in found.modules] == ["", "a"]
    assert dataclasses.replace(found) == found == pickle.loads(pickle.dumps(found))


def test_the_page_is_written_beside(model: Path, tmp_path: Path) -> None:
    found = ckptconv.inspect(model, html=tmp_path / "m.html")
    assert page_of(found) == (tmp_path / "m.html").read_text()
    with pytest.raises(ckptconv.UsageError, match="page"):
        ckptconv.inspect(model, html=model)


def test_an_opened_checkpoint_is_inspected_as_its_path_is(model: Path) -> None:
    for given in (open_source(model), *opened(model)):
        assert ckptconv.inspect(given, stats=True) == ckptconv.inspect(model, stats=True)


def test_progress_counts_the_bytes_of_the_statistics(model: Path) -> None:
    done: list[int] = []
    totals: list[int] = []
    ckptconv.inspect(model, stats=True, progress=done.append, on_total=totals.append)
    assert [sum(done)] == totals == [12 + 48]


def test_a_key_that_leads_nowhere_is_an_error(model: Path) -> None:
    with pytest.raises(ckptconv.UsageError, match="nowhere"):
        ckptconv.inspect(model, key="nowhere")
    with pytest.raises(ckptconv.UsageError, match="Did you mean stats"):
        ckptconv.inspect(model, stat=True)  # type: ignore[call-arg]
    with pytest.raises(ckptconv.UsageError, match="Did you mean stats"):
        ckptconv.inspect(model, statistics=True)  # type: ignore[call-arg]
