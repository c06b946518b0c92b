"""Tensors that a map makes one, as they are equal: such an output checks that they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptconv import convert
from ckptconv.errors import CorruptError

MAP = '[[rule]]\ncopied = true\njoined = "qkv"\napart = ["q", "k"]\n'


def test_copies_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text(MAP)
    for name, other in (("equal", 1), ("different", 2)):
        save_file({"q": torch.ones(2), "k": torch.full((2,), float(other))}, tmp_path / f"{name}.safetensors")
    convert(tmp_path / "equal.safetensors", tmp_path / "out", map=tmp_path / "map.toml", to="universal")
    with pytest.raises(CorruptError, match=r"'qkv' is stored twice, .*different values"):
        convert(tmp_path / "different.safetensors", tmp_path / "other", map=tmp_path / "map.toml", to="universal")
    assert not (tmp_path / "other").exists()
