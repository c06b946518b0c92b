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
        "Convert quantized weights (codes, scales, zero points) to plain ones, in bfloat16 or --dtype.",
        group=NAMING,
        common="convert",
    )
    quantize: str = deciding(
        choice(*ROUNDING_WAYS, words=_OTHER_WAYS, unset=""),
        "Quantize the weight matrices of layers: to FP8 with one scale for each block of 128 by 128 (fp8-block; scales "
        "of powers of two: fp8-block-ue8m0), each row (fp8-dynamic) or 32 elements (mxfp8), or to 4 bits with one "
        "scale for 32 elements (int4-g32, mxfp4) or for 16 (nvfp4 of compressed-tensors, nvfp4-modelopt of Model "
        "Optimizer). Embeddings, heads, norms and routers stay. Loaders were tried with fp8-block, mxfp8 and int4-g32.",
        metavar="FORMAT",
        group=NAMING,
        common="convert merge",
    )
    requantize: str = deciding(
        choice(*EXACT_WAYS, unset=""),
        "Change the format of quantized weights without changing any number; if the format cannot hold the same "
        "numbers, that is an error.",
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
        "It is part of the format: --quantize int4-g32 and mxfp4 have groups of 32, nvfp4 of 16, fp8-block blocks of "
        "128 by 128."
    ),
    "--dequant --dequantise --unquantize": "Use --dequantize.",
    "--ignore --ignore-layers --ignored-layers --skip-modules --exclude-modules --modules-to-not-convert": (
        "With --quantize, --keep GLOB leaves weights unquantized. --exclude GLOB leaves tensors out of the output."
    ),
}
