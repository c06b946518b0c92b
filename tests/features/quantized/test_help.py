"""What is said to those who look for quantized weights elsewhere."""

from __future__ import annotations

import pytest
from checkpoints import ckptconv_here

import ckptconv
from ckptconv.errors import UsageError


def test_a_dtype_of_codes_is_no_dtype_and_what_writes_them_is_named() -> None:
    for dtype in ("fp8", "int4", "float8_e4m3fn", "nf4"):
        ckptconv_here("convert", "x.pt", "--dtype", dtype).refused(
            2, "is not a supported output dtype.", "--quantize fp8-block"
        )
        with pytest.raises(UsageError, match="is not a supported output dtype") as caught:
            ckptconv.convert("x.pt", dtype=dtype)
        assert "quantize='fp8-block'" in caught.value.hint
