"""A step of DeepSpeed is opened: slices through partitions, and tensor-parallel ranks one by one."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ZERO, load_with_aliases
from features.arrays.reading import assert_reads, mapped
from features.deepspeed.zero_writer import Model, Save, write
from reading import KIB, counted

import ckptconv
from ckptconv import UnsupportedError

ROWS, COLUMNS, RANKS = 1000, 700, 4
MATRIX = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
# Tensor-parallel ranks that nothing tells how to join.
APART = ZERO / "tp_z2_mp2_w4/checkpoint"
# What is asked for, and the partitions that have it.
PARTS: list[tuple[Any, int]] = [
    (slice(None), 4),
    (0, 1),
    (slice(10, 200), 1),
    (slice(240, 260), 2),
    ((slice(None), 0), 4),
    ((slice(100, 120), slice(5, 9)), 1),
    ((slice(-1, None), slice(None, None, -1)), 1),
    (slice(0, 1000, 250), 4),
    ((slice(None, None, 100), 3), 4),
]


def test_tensor_parallel_ranks_are_opened_one_by_one(tmp_path: Path) -> None:
    report = ckptconv.convert(APART, tmp_path / "out", per_rank=True, fsync=False)
    assert sum("Not converted: the optimizer" in note for note in report.notes) == 1
    for rank in (0, 1):
        with ckptconv.open(APART, model_rank=rank) as ck:
            assert_reads(ck, load_with_aliases(tmp_path / "out" / f"mp_rank_{rank:02}"))
    with pytest.raises(UnsupportedError, match="tensor-parallel"):
        ckptconv.open(APART)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A matrix, cut into the partitions of a ZeRO-3 step of four ranks, as DeepSpeed lays it out."""
    return write(tmp_path_factory.mktemp("pieces"), Model([{"w": MATRIX}]), Save(3, RANKS))


def test_a_slice_through_partitions_reads_only_its_bytes(pieces: Path) -> None:
    with ckptconv.open(pieces, backend="pread") as ck:
        ck["w"][0, 0]
        for key, count in PARTS:
            with counted() as reads:
                part = ck["w"][key]
            assert torch.equal(part, torch.from_numpy(MATRIX.numpy()[key].copy())), key
            assert part.nbytes <= reads.nbytes <= part.nbytes + 64 * KIB * count, key


def test_short_runs_near_each_other_are_read_in_few_calls(pieces: Path) -> None:
    with ckptconv.open(pieces) as ck:
        with counted() as reads:
            part = ck["w"][:, ::2]
        assert torch.equal(part, MATRIX[:, ::2])
        assert reads.nbytes <= MATRIX.nbytes + 64 * KIB * RANKS
        assert reads.calls < 100


def test_a_slice_of_one_partition_is_mapped(pieces: Path) -> None:
    with ckptconv.open(pieces) as ck:
        ck["w"][0, 0]
        with counted() as reads:
            assert mapped(ck["w"][10:200])
        assert reads.nbytes == 0


def test_many_runs_take_bounded_memory(pieces: Path) -> None:
    with ckptconv.open(pieces, "np") as ck:
        tensor = ck["w"]
        tensor[0, 0]
        tracemalloc.start()
        part = tensor[:, 1::9]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < part.nbytes + 16 * KIB * KIB
