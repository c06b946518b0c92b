"""AutoAWQ's 4 bits: `awq/modules/linear/gemm.py`, `awq/models/_config.py`; AMD Quark's in the same layout:
`quark/torch/export/main_export/quant_config_parser.py`. Without zero points, Quark's are two's complement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptconv.features.quantized.configuration import Configuration
from ckptconv.features.quantized.dialects import Dialect
from ckptconv.features.quantized.table import FLOATS, Format, Part, Sizes
from ckptconv.features.quantized.words import GPTQ, idle, quark_export
from ckptconv.storage.strict_json import OrNull

_VERSIONS = OrNull(frozenset(("gemm", "GEMM")))
_WORDS = {
    **GPTQ,
    **idle("zero_point do_fuse fuse_max_seq_len modules_to_fuse"),
    "export?": quark_export("reorder"),
    "pack_method?": frozenset(("reorder",)),
    **dict.fromkeys(("version?", "format?", "checkpoint_format?"), _VERSIONS),
}


def _of(*, signed: bool) -> Callable[[Configuration, str], Iterator[tuple[str, Sizes]]]:
    def sizes(told: Configuration, name: str) -> Iterator[tuple[str, Sizes]]:
        size = told.told.get("group_size")
        is_signed = "export" in told.told and told.told.get("zero_point") is False
        if told.method == "awq" and told.told.get("bits") == 4 and type(size) is int and is_signed == signed:
            yield "AWQ int4", {"b": 4, "C": size if size > 0 else "K"}

    return sizes


PARTS = {
    "codes": Part("=.qweight", "int32", "K N*4/32"),
    "scale": Part("=.scales", FLOATS, "K/C N"),
    "zero": Part("=.qzeros", "int32", "K/C N*4/32"),
}
_FORMATS = (
    Format("N K", "awq", PARTS, _of(signed=False), own=True),
    Format("N K", "signed awq", PARTS, _of(signed=True)),
)
DIALECT = Dialect(_FORMATS, words={"awq": _WORDS})
