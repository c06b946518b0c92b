"""What tests of the trunk ask of quantized weights too."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

# Of each option: its default, a value, and how that may be written; values that it has not; and any that it has.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {
    "dequantize": (False, True, [True]),
    "quantize": ("", "mxfp8", ["mxfp8"]),
    "requantize": ("", "mxfp8", ["mxfp8"]),
    "keep": ((), ("*.bias",), ["*.bias", ("*.bias",), ["*.bias"]]),
}
REFUSED_VALUES: dict[str, list[Any]] = {
    "quantize": ["fp8", "nf4", True, 3],
    "requantize": ["int4-g32", True, 3],
    "keep": [3, b"x", [3]],
}
DECIDING = {
    "dequantize": st.booleans(),
    "quantize": st.sampled_from(["fp8-block", "int4-g32"]),
    "requantize": st.sampled_from(["fp8-block", "mxfp8"]),
    "keep": st.text(max_size=5) | st.lists(st.text(max_size=5)),
}
