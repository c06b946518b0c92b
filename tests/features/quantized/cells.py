"""What tests of the trunk ask of quantized weights too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from faults import Plant, tiles
from features.quantized import dialects
from hypothesis import strategies as st

import ckptconv
from ckptconv.features.quantized.computing import Dequantize, Largest, Quantize, QuantizeFp4, Rescale
from ckptconv.features.quantized.options import ROUNDING_WAYS
from ckptconv.features.quantized.table import WAYS as _WAYS
from ckptconv.result import Report
from ckptconv.tensors.computing import Axis, Tile, Tiled
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor, Stored
from ckptconv.tensors.moves import File

# Of each option: its default, a value, and how that may be written; values that it has not; and any that it has.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {
    "dequantize": (False, True, [True]),
    "quantize": ("", "mxfp8", ["mxfp8"]),
    "requantize": ("", "mxfp8", ["mxfp8"]),
    "keep": ((), ("*.bias",), ["*.bias", ("*.bias",), ["*.bias"]]),
}
REFUSED_VALUES: dict[str, list[Any]] = {
    "quantize": ["fp8", "nf4", "nvfp4-", True, 3],
    "requantize": ["int4-g32", True, 3],
    "keep": [3, b"x", [3]],
}
DECIDING = {
    "dequantize": st.booleans(),
    "quantize": st.sampled_from(["fp8-block", "int4-g32"]),
    "requantize": st.sampled_from(["fp8-block", "mxfp8"]),
    "keep": st.text(max_size=5) | st.lists(st.text(max_size=5)),
}


# ---------------------------------------------------------------------------------------------------- what is computed

# A model, and the name of a weight in it.
QUANTIZED_MODELS = [(dialects.QUANTIZED / "block-fp8-f32", "model.layers.1.self_attn.q_proj.weight")]
# Small checkpoints of every dialect, and the ways to quantize.
DIALECTS, QUANTIZING_WAYS = dialects, _WAYS


def _converting(**asked: Any) -> Callable[..., Report]:
    return lambda here, source, out, **options: ckptconv.convert(f"{here}/{source}", out, **asked, **options)


def SOURCES(here: Path) -> None:  # noqa: N802
    """Put the model `a`, quantized, as `powers`, beside it."""
    ckptconv.convert(here / "a", here / "powers", quantize="fp8-block-ue8m0", fsync=False)


JOBS = {
    **{way: (_converting(quantize=way), "a") for way in ROUNDING_WAYS},
    "requantize": (_converting(requantize="mxfp8"), "powers"),
}
# Of each kind one.
SOME = ["fp8-block", "requantize"]
# Ways to compute, and what shows each.
COMPUTING: dict[str, tuple[Callable[..., object], str]] = {
    "dequantize": (_converting(dequantize=True), "powers"),
    "quantize": JOBS["fp8-block"],
}
# What becomes of each option in each kind of output; the option, others that it needs, and the source.
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {
    "dequantize": ("hhss", {"dequantize": True}, (), "quantized"),
    "quantize": ("hhss", {"quantize": "fp8-block"}),
    "requantize": ("hhss", {"requantize": "fp8-block"}, (), "quantized"),
    "keep": ("hhss", {"keep": "l1.*"}, (("quantize", "fp8-block"),)),
}
# Options that a conversion says something of, by source.
TELLING: list[tuple[str, dict[str, Any]]] = [("zero3", {"dequantize": True})]


# --------------------------------------------------------------------------------------------------------- the kernels

F32 = DTYPES["float32"]
CODES = Inline(bytes(range(1, 33)), DTYPES["uint8"], (2, 16))
POWERS = Inline(bytes([120, 122]), DTYPES["float8_e8m0fnu"], (2, 1))
SCALES = Inline(np.array([[0.5], [3]], "<f4").tobytes(), F32, (2, 1))
NUMBERS = Inline(np.linspace(-3, 4, 64).astype("<f4").tobytes(), F32, (2, 32))
# A tensor of each kernel.
SAMPLES: dict[type[Any], LazyTensor] = {
    Quantize: Tiled(
        (Inline(np.linspace(-3, 9, 30).astype("<f4").tobytes(), F32, (5, 6)),),
        ((Axis(0), Axis(1)),),
        Quantize("codes", "float8_e4m3fn", "float32", 2, 4, (448.0,), False, False, "x"),
        DTYPES["float8_e4m3fn"],
        (5, 6),
        (0, 0),
        (2, 4),
    ),
    Rescale: Tiled(
        (CODES, POWERS, POWERS),
        ((Axis(0), Axis(1, 8)), (Axis(0), Axis(1, 1, 2)), (Axis(0, 0), Axis(0, 0))),
        Rescale("scales", "x"),
        DTYPES["float8_e4m3fn"],
        (2, 2),
        (0, 0),
    ),
    Largest: Tiled((NUMBERS,), ((Axis(0), Axis(1, 16)),), Largest("rows", 16, "x"), F32, (2, 2), (0, 0)),
    QuantizeFp4: Tiled(
        (NUMBERS, Inline(np.array([700], "<f4").tobytes(), F32, (1,))),
        ((Axis(0), Axis(1, 2)), (Axis(0, 0),)),
        QuantizeFp4("codes", "over", "x"),
        DTYPES["uint8"],
        (2, 16),
        (0, 0),
        (1, 8),
    ),
    Dequantize: Tiled(
        (CODES, SCALES),
        ((Axis(0), Axis(1, 4, 8)), (Axis(0), Axis(1, 1, 32))),
        Dequantize("e2m1", ("scale",)),
        F32,
        (2, 32),
        (0, 0),
    ),
}


def _in_file(file: File) -> Tiled:
    return Tiled(
        (Stored(file, 0, DTYPES["float8_e4m3fn"], (4, 6), (6, 1)), Stored(file, 24, F32, (2, 2), (2, 1))),
        ((Axis(0), Axis(1)), (Axis(0, 1, 3), Axis(1, 1, 4))),
        Dequantize("own", ("scale",), 0, False, "bfloat16", "x.scale"),
        F32,
        (4, 6),
        (0, 0),
    )


# Tensors that stand in a file.
EXPRESSIONS = [_in_file]
# Expressions that cannot be, and why.
REFUSED_KERNELS: dict[str, tuple[list[Any], str]] = {
    "scales of other elements": (
        [
            "tiled",
            [["zeros", "uint8", [4, 8]], ["zeros", "float32", [4, 1]]],
            [[[0, 1, 1], [1, 1, 1]], [[0, 1, 1], [1, 1, 4]]],
            ["dequantize", "own", ["scale"], 0, False, "float32", "x"],
            "float32",
            [4, 8],
            [0, 0],
            [],
        ],
        "does not yield float32",
    ),
    "blocks larger than memory": (
        [
            "tiled",
            [["zeros", "float32", [4, 8]]],
            [[[0, 1, 1], [1, 1, 1]]],
            ["quantize", "codes", "float8_e4m3fn", "float32", 1 << 30, 1 << 30, [448.0], False, False, "x"],
            "float8_e4m3fn",
            [4, 8],
            [0, 0],
            [1 << 30, 1 << 30],
        ],
        "does not yield float8_e4m3fn",
    ),
    "quantizing to nothing": (
        [
            "tiled",
            [["zeros", "float32", [4, 8]]],
            [[[0, 1, 1], [1, 1, 1]]],
            ["quantize", "codes", "float8_e4m3fn", "float32", 2, 2, [], False, False, "x"],
            "float8_e4m3fn",
            [4, 8],
            [0, 0],
            [2, 2],
        ],
        "does not yield float8_e4m3fn",
    ),
    "the best of scales of floats": (
        [
            "tiled",
            [["zeros", "float32", [4, 8]]],
            [[[0, 1, 1], [1, 1, 1]]],
            ["quantize", "codes", "float8_e4m3fn", "float32", 2, 2, [448.0, 224.0], False, False, "x"],
            "float8_e4m3fn",
            [4, 8],
            [0, 0],
            [2, 2],
        ],
        "does not yield float8_e4m3fn",
    ),
    "blocks that are not needed whole": (
        [
            "tiled",
            [["zeros", "float32", [4, 8]]],
            [[[0, 1, 1], [1, 1, 1]]],
            ["quantize", "codes", "float8_e4m3fn", "float32", 2, 2, [448.0], False, False, "x"],
            "float8_e4m3fn",
            [4, 8],
            [0, 0],
            [],
        ],
        "does not yield float8_e4m3fn",
    ),
    "scales of nothing": (
        [
            "tiled",
            [["zeros", "float32", [4, 8]]],
            [[[0, 2, 1], [1, 2, 1]]],
            ["quantize", "scales", "float8_e4m3fn", "float32", 2, 2, [448.0], False, False, "x"],
            "float32",
            [3, 4],
            [0, 0],
            [],
        ],
        "does not yield float32",
    ),
    "the largest of other rows": (
        [
            "tiled",
            [["zeros", "float32", [4, 8]]],
            [[[0, 1, 1], [1, 4, 1]]],
            ["largest", "rows", 4, "x"],
            "float32",
            [4, 3],
            [0, 0],
            [],
        ],
        "does not yield float32",
    ),
    "four bits without the scale of the weight": (
        [
            "tiled",
            [["zeros", "float32", [4, 32]]],
            [[[0, 1, 1], [1, 16, 1]]],
            ["quantize fp4", "scales", "over", "x"],
            "float8_e4m3fn",
            [4, 2],
            [0, 0],
            [],
        ],
        "does not yield float8_e4m3fn",
    ),
    "more scales than are looked at together": (
        [
            "tiled",
            [["zeros", "float8_e8m0fnu", [1 << 20, 1 << 10]]],
            [[[0, 0, 1], [0, 0, 1]]],
            ["rescale", "global", "x"],
            "float32",
            [1],
            [0],
            [],
        ],
        "does not yield float32",
    ),
}


def one_bit_of_codes(tile: Tile, bits: np.ndarray) -> None:
    if tile.kernel.made == "codes":
        bits[0] ^= 1


def one_scale_of_its_neighbour(tile: Tile, bits: np.ndarray) -> None:
    if tile.kernel.made == "scales":
        # The exponent's last bit, whatever the dtype.
        bits[min(len(bits), 4) - 1] ^= 2


_OF_CODES = ["fp8-block", "mxfp8", "int4-g32", "requantize"]
# Faults of kernels, and the jobs in which each is found.
MADE: dict[str, tuple[Plant, list[str]]] = {
    "a bit of a code": (tiles(Quantize, one_bit_of_codes), _OF_CODES),
    "a scale that is none of its tile": (tiles(Quantize, one_scale_of_its_neighbour), _OF_CODES),
    "another largest code": (
        tiles(Quantize, largest=lambda kernel: tuple(most / 2 for most in kernel.largest)),
        ["fp8-block", "int4-g32"],
    ),
    "powers of two": (tiles(Quantize, power=lambda kernel: not kernel.power), ["fp8-block", "fp8-block-ue8m0"]),
}


# ---------------------------------------------------------------------------------------------------- what is printed

# Words in the place of a command, and what is meant; options of other programs, and what is said.
MEANT = {"quantize": "convert --quantize fp8-block", "dequantize": "convert --dequantize"}
OTHER_OPTIONS = {
    "--int4": "Use --quantize int4-g32, mxfp4 or nvfp4 for 4 bits.",
    "--load-in-4bit": "int4-g32",
    "--load-in-8bit": "Use --quantize fp8-block or mxfp8 for 8 bits.",
    "--quant": "fp8-block for 8 bits, or int4-g32 for 4 bits",
    "--group-size": "--quantize int4-g32 and mxfp4 have groups of 32",
}
# In Python too.
MISSPELT = [("convert", "load_in_4bit", "Use quantize int4-g32")]
SAID = [
    ("convert model.pt x --quantize fp8", 2, "Did you mean fp8-block or fp8-block-ue8m0 or fp8-dynamic?"),
    ("convert model.pt x --quantize w4a16", 2, "Did you mean int4-g32?"),
    # nvfp4 is spelled like it, and is another format.
    ("convert model.pt x --quantize nf4", 2, "or nvfp4-modelopt. NF4 is read with --dequantize, but not written"),
    ("convert model.pt x --quantize nvfp", 2, "Did you mean nvfp4 or nvfp4-modelopt?"),
    ("convert model.pt x --quantize gptq", 2, "it may be fp8-block, ;or nvfp4-modelopt."),
]
