"""Digests of outputs that are made in parts: they are in the manifest that `finish` writes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptconv import convert, finish
from ckptconv.errors import CorruptError, UsageError


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "mixed.pt"
    torch.save({"large": torch.randn(700, 1100), "small": torch.ones(3), "epoch": 3}, path)
    return path


def test_a_part_of_a_single_file_is_finished_with_a_place_for_its_digests(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    convert(mixed, out, digest="sha256", part=(0, 1))
    with pytest.raises(UsageError, match="is a single file without a manifest"):
        finish(out)
    finish(out, manifest=tmp_path / "out.json")
    entry = json.loads((tmp_path / "out.json").read_text())["files"][out.name]
    assert entry["digests"]["file"] == hashlib.sha256(out.read_bytes()).hexdigest()


def test_a_description_with_unknown_inputs_is_refused(mixed: Path, tmp_path: Path) -> None:
    convert(mixed, tmp_path / "out", digest="sha256", part=(0, 1))
    (described,) = (tmp_path / "out").glob(".ckptconv-*/.plan.json")
    told = json.loads(described.read_text())
    unknown: list[Any] = [[], {"a": "b"}]
    unknown += [{"a": entry} for entry in (["b", 1], [1, 1, ""], ["\0", 1, ""], ["b", -1, ""])]
    for inputs in unknown:
        described.write_text(json.dumps({**told, "inputs": inputs}))
        with pytest.raises(CorruptError, match="is damaged"):
            finish(tmp_path / "out")
