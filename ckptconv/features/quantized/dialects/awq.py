"""AutoAWQ's 4 bits: `awq/modules/linear/gemm.py`, `awq/models/_config.py`."""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.features.quantized.configuration import Configuration
from ckptconv.features.quantized.dialects import Dialect
from ckptconv.features.quantized.table import FLOATS, Format, Part, Sizes
from ckptconv.features.quantized.words import GPTQ, idle
from ckptconv.storage.strict_json import OrNull

_VERSIONS = OrNull(frozenset(("gemm", "GEMM")))
_WORDS = {
    **GPTQ,
    **idle("zero_point do_fuse fuse_max_seq_len modules_to_fuse"),
    **dict.fromkeys(("version?", "format?", "checkpoint_format?"), _VERSIONS),
}


def _sizes(told: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
    size = told.told.get("group_size")
    if told.method == "awq" and told.told.get("bits") == 4 and type(size) is int:
        yield "AWQ int4", {"b": 4, "C": size if size > 0 else "K"}


PARTS = {
    "codes": Part("=.qweight", "int32", "K N*4/32"),
    "scale": Part("=.scales", FLOATS, "K/C N"),
    "zero": Part("=.qzeros", "int32", "K/C N*4/32"),
}
DIALECT = Dialect(formats=(Format("N K", "awq", PARTS, _sizes, own=True),), words={"awq": _WORDS})
