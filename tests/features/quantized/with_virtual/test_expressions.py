"""What expressions of quantized weights may say in JSON."""

from __future__ import annotations

from typing import Any

import pytest

from ckptconv.features.quantized.quantize import MOST_SCALES
from ckptconv.features.virtual.expressions import Decoder
from ckptconv.tensors.computing import Tiled


def _looked_up(codes: str = "table4", offset: int = 0, along: int = 0) -> list[Any]:
    parts = [["zeros", "uint8", [4]], ["zeros", "float32", [1]], ["zeros", "float32", [16]]]
    kernel = ["dequantize", codes, ["scale", "table"], offset, False, "float32", "x"]
    return ["tiled", parts, [[[0, 4, 8]], [[0, 1, 8]], [[0, along, 1]]], kernel, "float32", [8], [0], []]


def _codes_of(codes: str) -> list[Any]:
    kernel = ["quantize", "codes", codes, "float32", 128, 128, [448.0], False, False, "x"]
    parts, axes = [["zeros", "float32", [2, 3]]], [[[0, 1, 1], [1, 1, 1]]]
    return ["tiled", parts, axes, kernel, "float8_e4m3fn", [2, 3], [0, 0], [128, 128]]


def _largest_of(columns: int = 4, whole: tuple[int, ...] = ()) -> list[Any]:
    parts, axes = [["zeros", "float32", [2, 8]]], [[[0, 1, 1], [1, columns, 1]]]
    return ["tiled", parts, axes, ["largest", "rows", 4, "x"], "float32", [2, 2], [0, 0], [*whole]]


def _fp4_of(columns: int = 2, whole: tuple[int, ...] = (1, 16)) -> list[Any]:
    parts, axes = [["zeros", "float32", [2, 32]]], [[[0, 1, 1], [1, columns, 1]]]
    return ["tiled", parts, axes, ["quantize fp4", "codes", "mx", "x"], "uint8", [2, 16], [0, 0], [*whole]]


def _global_of(rows: int) -> list[Any]:
    parts, axes = [["zeros", "float8_e8m0fnu", [rows, 1]]], [[[0, 0, 1], [0, 0, 1]]]
    return ["tiled", parts, axes, ["rescale", "global", "x"], "float32", [1], [0], []]


def test_what_a_kernel_cannot_make_is_refused_before_it_is_asked() -> None:
    decoder = Decoder([], [])
    for sound in (_looked_up(), _codes_of("float8_e4m3fn"), _largest_of(), _fp4_of(), _global_of(9)):
        assert isinstance(decoder.decode(sound), Tiled)
    for told in (
        _looked_up(offset=1),
        _looked_up(along=1),
        _looked_up("table8"),
        _codes_of("int9"),
        _codes_of("table8"),
        _largest_of(columns=3),
        _largest_of(whole=(1, 4)),
        _fp4_of(columns=1),
        _fp4_of(whole=()),
        _global_of(MOST_SCALES + 1),
    ):
        with pytest.raises(ValueError, match="does not yield"):
            decoder.decode(told)
