"""What is computed is rounded once, to the dtype that is wanted last: a weight of every dialect, on every way.

A weight is its product in float32. Where its program computes in the dtype of the scales, as for GPTQ, AWQ and the
integers of compressed-tensors, a weight of another dtype of 16 bits is that product rounded to the one of the scales.
"""

from __future__ import annotations

from pathlib import Path

import torch
from effort import every
from features.quantized.dialects import MADE_CODES, QUANTIZED, products
from safetensors.torch import load_file

import ckptconv
from ckptconv.tensors import casting
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Concat, Narrow, Picked, Stored, Tagged, TensorFacts, View
from ckptconv.tensors.moves import File


@every("case", MADE_CODES)
def test_codes_are_made_of_the_product(case: str, tmp_path: Path) -> None:
    products(case, tmp_path)
    ckptconv.convert(QUANTIZED / case, tmp_path / "codes", dequantize=True, quantize="fp8-block", fsync=False)
    ckptconv.convert(tmp_path / "products", tmp_path / "again", quantize="fp8-block", fsync=False)
    codes, again = (load_file(tmp_path / each / "model.safetensors") for each in ("codes", "again"))
    quantized = [name for name in again if name.endswith("_scale_inv")]
    assert quantized
    for scale in quantized:
        for name in (scale, scale.removesuffix("_scale_inv")):
            assert torch.equal(codes[name].view(torch.uint8), again[name].view(torch.uint8)), name


def test_a_cast_goes_through_views_to_what_was_computed() -> None:
    wide, narrow = DTYPES["float64"], DTYPES["bfloat16"]
    inner = Stored(File("f", 1 << 20), 0, wide, (4, 6), (6, 1))
    stored = Stored(File("f", 1 << 20), 0, narrow, (4, 6), (6, 1))
    made = casting.rounded(inner, narrow)
    mixed = Concat((made, stored))
    for view, shown in (
        (made, inner),
        (View(made, narrow, (24,)), View(inner, wide, (24,))),
        (Narrow(made, 0, 1, 2), Narrow(inner, 0, 1, 2)),
        (Picked(made, 1, (6, 4), (1, 6)), Picked(inner, 1, (6, 4), (1, 6))),
        (Tagged(made, TensorFacts()), Tagged(inner, TensorFacts())),
        (Concat((View(made, narrow, (6, 4)), View(made, narrow, (6, 4)))), Concat((View(inner, wide, (6, 4)),) * 2)),
        (mixed, Concat((inner, casting.cast(stored, wide)))),
    ):
        assert casting.unrounded(view) == shown
        assert casting.cast(view, wide) == shown
        again = casting.cast(casting.cast(view, DTYPES["float16"]), wide)
        assert again == shown or view is mixed  # what is stored is what it is cast to
        assert casting.cast(view, narrow) is view
    # Bits that are seen as others are what they are.
    bits = View(made, DTYPES["uint16"], (4, 6))
    assert casting.unrounded(bits) == bits
    # So are elements that a file holds.
    assert casting.unrounded(casting.cast(inner, narrow)).dtype == narrow
