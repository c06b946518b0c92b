"""Tensors whose elements lie here and there are read in few and large pieces, by conversions and verifications."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from cells import verified
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckptconv import convert
from ckptconv.storage import files as storage
from ckptconv.storage.coalesce import BLOCK, NEAR, are_near, blocks
from ckptconv.tensors.moves import Runs

GRIDS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9000)), max_size=3).map(tuple)


@given(st.integers(0, 10), st.integers(1, 9000), GRIDS)
def test_blocks_are_the_runs_in_their_order(offset: int, length: int, grid: tuple[tuple[int, int], ...]) -> None:
    runs = Runs(offset, length, grid)
    found = list(blocks(runs))
    assert [at for block in found for at in block.offsets()] == list(runs.offsets())
    assert all(block.length == length for block in found)
    for block in found:
        span, wanted = block.stop - block.offset, math.prod(count for count, _ in block.grid)
        assert span <= max(BLOCK, length)
        assert span <= wanted * (length + NEAR)
    assert are_near(runs) == (bool(grid) and grid[-1][1] - length <= NEAR)


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "every 20th": lambda: torch.arange(4_000_000).to(torch.uint8)[::20],
    "every 600th": lambda: torch.arange(12_000_000).to(torch.uint8)[::600],
    "every 3000th": lambda: torch.arange(12_000_000).to(torch.uint8)[::3000],
    "bits reversed": lambda: torch.arange(1 << 20).to(torch.uint8).view([2] * 20).permute(list(range(20))[::-1]),
    "a column": lambda: torch.arange(6_000_000).to(torch.uint8).view(2000, 3000)[:, 7],
    "columns": lambda: torch.arange(6_000_000).to(torch.uint8).view(2000, 3000)[:, 7:2000:9].mT,
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_single_bytes_take_few_reads(
    made: Callable[[], torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def counted(real: Callable[..., int]) -> Callable[..., int]:
        def read(*arguments: object) -> int:
            reads.append(1)
            return real(*arguments)

        return read

    tensor = made()
    torch.save({"w": tensor}, tmp_path / "model.pt")
    for name in ("preadv", "pread"):
        monkeypatch.setattr(storage.os, name, counted(getattr(storage.os, name)))
    few: Sequence[int] = (tensor.numel() // 4, 2000)
    convert(tmp_path / "model.pt", tmp_path / "model.safetensors")
    assert len(reads) < min(few)
    reads.clear()
    verified(tmp_path / "model.pt", tmp_path / "model.safetensors")
    assert len(reads) < min(few)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], tensor)
