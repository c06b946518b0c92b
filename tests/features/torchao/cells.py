"""Files of torchao that tests of the trunk read too."""

from __future__ import annotations

from pathlib import Path

_DATA = Path(__file__).parent / "data"
# Files of one weight, `0.weight`, quantized by codes and scales, without the suffixes that they have in both formats;
# and those whose scales are not read.
PARTED = {case: _DATA / case for case in ("float8", "int8", "intx")}
SHUFFLED = [_DATA / "mx"]
