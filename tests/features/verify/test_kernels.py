"""Every kernel has an evaluator of its own that a fault in the kernel does not touch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from faults import one_bit, spoiled
from kernel_samples import SAMPLES, evaluated, made

from ckptconv.tensors import computing, kernels, moves, tile_kernels
from ckptconv.tensors.registered import HOMES

# Those that moves are made of, and that no expression names; a kernel of tiles is carried out by `Tile`.
OF_MOVES = {moves.Gather, computing.Tile}


def test_no_kernel_is_left_out() -> None:
    tables = [getattr(import_module(home.engine), table, {}) for home in HOMES for table in ("JOINING", "TILING")]
    of_homes = {kernel for table in tables for kernel in table}
    assert SAMPLES.keys() == ({*kernels.FUNCTIONS, *tile_kernels.TILING} - OF_MOVES) | of_homes


@pytest.mark.parametrize("kernel", SAMPLES)
def test_its_evaluator_finds_a_fault(kernel: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = SAMPLES[kernel]
    assert [made(tensor)] == evaluated(tensor)
    runs = computing.Tile if tile_kernels.TILING.find(kernel) else kernel
    spoiled(runs, one_bit)(monkeypatch)
    assert [made(tensor)] != evaluated(tensor)
