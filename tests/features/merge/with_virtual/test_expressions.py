"""Expressions of products in JSON: what they may say."""

from __future__ import annotations

from typing import Any

import pytest

from ckptconv.features.virtual.expressions import Decoder
from ckptconv.tensors.computing import Tiled


def _factors_of(rank: int) -> list[Any]:
    parts = [["zeros", "float32", sides] for sides in ([2, 3], [2, rank], [rank, 3])]
    axes = [[[0, 1, 1], [1, 1, 1]], [[0, 1, 1], [0, 0, 1]], [[0, 0, 1], [1, 1, 1]]]
    return ["tiled", parts, axes, ["low rank", 1.0], "float64", [2, 3], [0, 0], []]


def _rows_of(columns: int) -> list[Any]:
    parts, axes = [["zeros", "float32", [2, columns]], ["zeros", "float32", [2]]], [[[0, 1, 1], [1, 0, 1]], [[0, 1, 1]]]
    return ["tiled", parts, axes, ["magnitude"], "float64", [2, columns], [0, 0], []]


def test_what_a_kernel_cannot_make_is_refused_before_it_is_asked() -> None:
    decoder = Decoder([], [])
    for sound in (_factors_of(1 << 17), _rows_of(1 << 20)):
        assert isinstance(decoder.decode(sound), Tiled)
    for told in (_factors_of((1 << 17) + 1), _rows_of((1 << 20) + 1)):
        with pytest.raises(ValueError, match="does not yield"):
            decoder.decode(told)
