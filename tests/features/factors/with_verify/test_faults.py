"""Verification finds a fault in tiles of products."""

from __future__ import annotations

import pytest
from faults import one_bit, spoiled
from features.factors.cells import SAMPLES
from kernel_samples import evaluated, made

from ckptconv.features.factors.kernels import LowRank
from ckptconv.tensors.computing import Tile
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Convert
from ckptconv.tensors.moves import Cast


def test_its_evaluator_finds_a_fault_in_products_that_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = Convert(SAMPLES[LowRank], Cast("float64", "bfloat16"), DTYPES["bfloat16"])
    assert [made(tensor)] == evaluated(tensor)
    spoiled(Tile, one_bit)(monkeypatch)
    assert [made(tensor)] != evaluated(tensor)
