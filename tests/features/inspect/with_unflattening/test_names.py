"""Safetensors with a structure record, as `inspect` shows them."""

from __future__ import annotations

from pathlib import Path

import torch

import ckptconv


def test_names_are_those_of_the_file_where_a_structure_record_has_other_keys(tmp_path: Path) -> None:
    torch.save({"state": {"m.a": torch.ones(2), "m.b": torch.ones(3)}, "epoch": 3}, tmp_path / "x.pt")
    ckptconv.convert(tmp_path / "x.pt", tmp_path / "x.safetensors", strip_prefix="state.m.")
    summary = ckptconv.inspect(tmp_path / "x.safetensors", include="?")
    assert [tensor.name for tensor in summary.tensors] == ["a", "b"]
    assert summary.values == {"epoch": 3}
    in_state = ckptconv.inspect(tmp_path / "x.safetensors", key="state")
    assert [tensor.name for tensor in in_state.tensors] == ["m.a", "m.b"]
