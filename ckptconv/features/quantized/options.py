"""The options of conversions about quantized weights."""

from __future__ import annotations

from ckptconv.options import NAMING
from ckptconv.options.kinds import FLAG, TEXTS, choice
from ckptconv.options.option import Given, deciding

ROUNDING_WAYS = (
    *("fp8-block", "fp8-block-ue8m0", "fp8-dynamic", "mxfp8", "int4-g32", "mxfp4", "nvfp4", "nvfp4-modelopt"),
)
_OTHER_WAYS = {"w4a16": "int4-g32", "deepseek": "fp8-block", "w8a8-fp8": "fp8-dynamic", "modelopt": "nvfp4-modelopt"}
EXACT_WAYS = ("fp8-block", "fp8-block-ue8m0", "mxfp8", "nvfp4")


class Quantizing(Given):
    """The options that dequantize weights, and that quantize them."""

    dequantize: bool = deciding(
        FLAG,
        "Convert quantized weights (codes, scales, zero points) to plain weights, in bfloat16 or --dtype.",
        group=NAMING,
        common="convert",
    )
    quantize: str = deciding(
        choice(*ROUNDING_WAYS, words=_OTHER_WAYS, unset=""),
        "Quantize the weight matrices of layers. To FP8, with one scale per block of 128 by 128 (fp8-block; with "
        "powers of two as scales: fp8-block-ue8m0), per row (fp8-dynamic) or per 32 elements (mxfp8). To 4 bits, with "
        "one scale per 32 elements (int4-g32, mxfp4) or per 16 (nvfp4 of compressed-tensors, nvfp4-modelopt of Model "
        "Optimizer). Embeddings, heads, norms and routers stay unquantized. Loaders were tested with fp8-block, mxfp8 "
        "and int4-g32.",
        metavar="FORMAT",
        group=NAMING,
        common="convert merge",
    )
    requantize: str = deciding(
        choice(*EXACT_WAYS, unset=""),
        "Change the format of quantized weights without changing any number. It is an error if the format cannot "
        "represent the numbers exactly.",
        metavar="fp8-block|fp8-block-ue8m0|mxfp8|nvfp4",
        group=NAMING,
    )
    keep: tuple[str, ...] = deciding(
        TEXTS,
        "Do not quantize tensors whose names match, such as '*.down_proj.*'; repeatable.",
        metavar="GLOB",
        group=NAMING,
    )


GIVEN = Quantizing
# Other words for it, as commands and as options.
OTHER_WORDS = {
    "convert --quantize fp8-block": ("quantize", "quantise", "quant"),
    "convert --dequantize": ("dequantize", "dequantise", "dequant"),
}
OTHER_OPTIONS = {
    "--fp8 --int4 --int8 --quantise --quantization --quant --q4 --q8 --nf4 --bits --load-in-4bit --load-in-8bit": (
        "Use --quantize, such as --quantize fp8-block."
    ),
    "--group-size --groupsize --q-group-size --block-size": (
        "The format determines it: --quantize int4-g32 and mxfp4 have groups of 32, nvfp4 has groups of 16, and "
        "fp8-block has blocks of 128 by 128."
    ),
    "--dequant --dequantise --unquantize": "Use --dequantize.",
    "--ignore --ignore-layers --ignored-layers --skip-modules --exclude-modules --modules-to-not-convert": (
        "With --quantize, --keep GLOB leaves weights unquantized. --exclude GLOB omits tensors from the output."
    ),
}
