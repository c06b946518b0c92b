"""The options of conversions about quantized weights."""

from __future__ import annotations

from typing import Any, Literal

from ckptconv.options import NAMING
from ckptconv.options.kinds import FLAG, TEXTS, choice
from ckptconv.options.option import Given, deciding

_LITERAL: Any = Literal
ROUNDING_WAYS = ("fp8-block", "fp8-block-ue8m0", "mxfp8", "int4-g32")
_EXACT_WAYS = ("fp8-block", "fp8-block-ue8m0", "mxfp8", "nvfp4")


class Quantizing(Given):
    """What is made of quantized weights, and which weights are quantized."""

    dequantize: bool = deciding(
        FLAG,
        "Make weights of quantized ones: of their codes, scales and zero points, as bfloat16 or --dtype.",
        group=NAMING,
        common="convert",
    )
    quantize: str = deciding(
        choice(*ROUNDING_WAYS, words=_LITERAL[ROUNDING_WAYS], unset=""),
        "Quantize the matrices of layers: to FP8 with a scale for 128 by 128 (fp8-block; of powers of two: "
        "fp8-block-ue8m0) or for 32 (mxfp8), or to 4 bits with a scale for 32 (int4-g32). Embeddings, heads, norms and "
        "routers stay as they are.",
        metavar="fp8-block|fp8-block-ue8m0|mxfp8|int4-g32",
        group=NAMING,
        common="convert merge",
    )
    requantize: str = deciding(
        choice(*_EXACT_WAYS, words=_LITERAL[_EXACT_WAYS], unset=""),
        "Give quantized weights another format that gives the same numbers, bit for bit; where it does not, that is an "
        "error.",
        metavar="fp8-block|fp8-block-ue8m0|mxfp8|nvfp4",
        group=NAMING,
    )
    keep: tuple[str, ...] = deciding(
        TEXTS, "Quantize no names that match, such as '*.down_proj.*'; repeatable.", metavar="GLOB", group=NAMING
    )


GIVEN = Quantizing
# What people call it, as commands and as options.
OTHER_WORDS = {
    "convert --quantize fp8-block": ("quantize", "quantise", "quant"),
    "convert --dequantize": ("dequantize", "dequantise", "dequant"),
}
OTHER_OPTIONS = {
    "--fp8 --int4 --int8 --quantise --quantization --quant --q4 --q8 --nf4": "It is --quantize, such as --quantize "
    "fp8-block.",
    "--dequant --dequantise --unquantize": "It is --dequantize.",
}
