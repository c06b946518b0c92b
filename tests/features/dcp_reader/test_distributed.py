"""DistributedReader: what torch.distributed.checkpoint loads of checkpoints of other formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dtensors import placed, playing
from features.dcp.cases import checkpoint_of
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptconv
from ckptconv import DistributedReader, UsageError
from ckptconv.storage.files import DescriptorReader

WEIGHT = torch.arange(9 * 4.0).reshape(9, 4)
# Of short rows, columns are read with what is between them.
WIDE = torch.arange(3 * 60_000.0).reshape(3, -1)


@pytest.fixture
def read() -> Iterator[list[int]]:
    """The numbers of bytes of data that are read."""
    counts: list[int] = []
    fill, fill_runs = DescriptorReader.fill, DescriptorReader.fill_runs

    def counted(self: Any, offset: int, buffers: Any) -> None:
        counts.append(sum(map(len, buffers)))
        fill(self, offset, buffers)

    def counted_runs(self: Any, offsets: Any, length: int, out: Any) -> None:
        counts.append(len(out))
        fill_runs(self, offsets, length, out)

    with mock.patch.multiple(DescriptorReader, fill=counted, fill_runs=counted_runs):
        yield counts


def load(state: dict[str, Any], reader: DistributedReader) -> None:
    dcp.load(state, storage_reader=reader, no_dist=True)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_rank_reads_its_own_shards(world: int, dim: int, tmp_path: Path, read: list[int]) -> None:
    weight = WIDE if dim else WEIGHT
    save_file({"weight": weight, "other": -weight}, tmp_path / "model.safetensors")
    for rank in range(world):
        with playing(rank, world):
            mesh = init_device_mesh("cpu", (world,))
            state = {"weight": placed(torch.zeros_like(weight), mesh, Shard(dim))}
            reader = DistributedReader(tmp_path / "model.safetensors")
            read.clear()
            load(state, reader)
            reader.close()
            own = state["weight"]
            assert isinstance(own, DTensor)
            local = own.to_local()
            parts = weight.chunk(world, dim)
            assert torch.equal(local, parts[rank] if rank < len(parts) else local[:0])
            assert sum(read) == local.nbytes


def test_another_dtype_is_cast_once(tmp_path: Path) -> None:
    save_file({"a.weight": WEIGHT / 3}, tmp_path / "model.safetensors")
    state = {"weight": torch.zeros(9, 4, dtype=torch.bfloat16)}
    load(state, DistributedReader(tmp_path / "model.safetensors", dtype="bf16", strip_prefix="a."))
    assert torch.equal(state["weight"], (WEIGHT / 3).bfloat16())


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    save_file({"weight": WEIGHT}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointException, match="bias"):
        load({"bias": torch.zeros(4)}, DistributedReader(tmp_path / "model.safetensors"))
    with pytest.raises(UsageError, match="does not exist"):
        DistributedReader(tmp_path / "none")
    with pytest.raises(UsageError, match="chunks"):
        DistributedReader(tmp_path / "model.safetensors", chunks=2)  # type: ignore[call-arg]


def test_a_class_known_by_name_only_is_left_out(tmp_path: Path) -> None:
    torch.save({"weight": WEIGHT, "extra": Path("x")}, tmp_path / "model.pt")
    state = {"weight": torch.zeros(9, 4)}
    load(state, DistributedReader(tmp_path / "model.pt"))
    assert torch.equal(state["weight"], WEIGHT)


def test_a_reader_of_a_checkpoint_without_tensors_has_its_values(tmp_path: Path) -> None:
    torch.save({"step": 7}, tmp_path / "x.pt")
    reader = DistributedReader(tmp_path / "x.pt", key=".")
    state = {"step": 0}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state == {"step": 7}


def test_what_a_conversion_warns_of_is_warned_of() -> None:
    path = checkpoint_of("leaves_nodist")
    expected = ckptconv.convert(path, "out", dry_run=True).warnings
    ways: list[Callable[..., Any]] = [ckptconv.open, ckptconv.load_state_dict, DistributedReader]
    for reading in ways:
        with pytest.warns(UserWarning, match="Left out: ") as caught:
            reading(path)
        assert [str(each.message) for each in caught] == expected, reading
        assert {each.filename for each in caught} == {__file__}, reading
