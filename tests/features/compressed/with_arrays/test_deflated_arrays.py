"""Deflated archives that are opened, and loaded."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from checkpoints import torch_file, torch_loaded
from compare import assert_same
from features.compressed.test_compressed import deflated
from states import STATES

import ckptconv

MATRIX = torch.arange(3000.0).reshape(50, 60)


def test_packed_tensors_are_unpacked_once(tmp_path: Path) -> None:
    torch.save({"a": MATRIX}, tmp_path / "plain.pt")
    with ckptconv.open(deflated(tmp_path / "plain.pt", tmp_path / "x.pt")) as ck:
        assert torch.equal(ck["a"][5:9, 3], MATRIX[5:9, 3])
        assert torch.equal(ck["a"].torch(), MATRIX)


def test_deflated_archives_are_loaded(tmp_path: Path) -> None:
    for name in ("one storage under different views", "fp8, uint16, complex64 and all others", "tied"):
        path = torch_file(tmp_path, STATES[name]())
        theirs = torch_loaded(path)
        os.replace(deflated(path, tmp_path / "packed"), path)
        assert_same({name: theirs}, {name: ckptconv.load_state_dict(path)})
