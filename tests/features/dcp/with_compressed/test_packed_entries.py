"""Entries that are compressed, as torch's extensions of streams write them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from effort import every
from features.dcp.cases import checkpoint_of, converted, copy_of, refused
from features.dcp.writer import Checkpoint, shards
from reading import state_of
from safetensors.torch import load_file
from stores import FAR

import ckptconv
from ckptconv.features.dcp import entries


def _packed(tensor: torch.Tensor, **options: Any) -> Checkpoint:
    zstandard = pytest.importorskip("zstandard")
    checkpoint = Checkpoint(pack=zstandard.ZstdCompressor(**options).compress, descriptors=["stream.zstd/1"])
    checkpoint.add(("model", "w"), tensor, shards(tuple(tensor.shape), 1, 2))
    checkpoint.add_value(("epoch",), list(range(40_000)))
    return checkpoint


@every("rows", [2, 40_000])
def test_packed_entries_are_unpacked_on_the_way(rows: int, tmp_path: Path) -> None:
    tensor = torch.arange(rows * 8, dtype=torch.float32).reshape(rows, 8)
    directory = _packed(tensor).write(tmp_path / "c")
    converted(directory, tmp_path / "out.safetensors", "--checksum")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], tensor)
    assert state_of(directory, key=".")["epoch"] == list(range(40_000))


def test_packed_entries_that_are_damaged(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 1 << 30, (4000, 8), generator=generator, dtype=torch.int32)
    checkpoint = _packed(tensor)
    for offset in (0, 40, 30_000, 60_000):
        data = bytearray(checkpoint.files["__1_0.distcp"])
        data[offset] ^= 4
        directory = checkpoint.write(tmp_path / "c")
        (directory / "__1_0.distcp").write_bytes(data)
        refused(directory, tmp_path / "out.safetensors", 4)


def test_packed_entries_that_unpack_to_more_than_they_can_be(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    checkpoint = Checkpoint(pack=lambda data: zstandard.compress(data + bytes(1 << 24)), descriptors=["stream.zstd/1"])
    checkpoint.add(("model", "w"), torch.ones(2))
    assert "unpacks to more" in refused(checkpoint.write(tmp_path / "c"), tmp_path / "out.safetensors", 4)


def test_packed_entries_that_unpack_to_very_much_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata may tell of terabytes of zeros, which take kilobytes, and hours to unpack."""
    tensor = torch.zeros(1 << 20, 8)
    directory = _packed(tensor).write(tmp_path / "c")
    converted(directory, tmp_path / "sound.safetensors")
    monkeypatch.setattr(entries, "ROOM_TO_GROW", 1 << 20)
    assert "unpacks to more" in refused(directory, tmp_path / "out.safetensors", 4)


def test_the_package_that_unpacks_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = copy_of("zstd_w2", tmp_path)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "pip install 'ckptconv[zstd]'" in refused(directory, tmp_path / "out.safetensors", 5)


@FAR
def test_packed_entries_far_away(tmp_path: Path) -> None:
    far = fsspec.filesystem("memory")
    for path in checkpoint_of("zstd_w2").iterdir():
        far.pipe_file(f"/{tmp_path.name}/step-5/{path.name}", path.read_bytes())
    converted(checkpoint_of("zstd_w2"), tmp_path / "near.safetensors")
    ckptconv.convert(f"memory://{tmp_path.name}/step-5", tmp_path / "far.safetensors", fsync=False)
    assert (tmp_path / "far.safetensors").read_bytes() == (tmp_path / "near.safetensors").read_bytes()
