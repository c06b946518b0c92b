"""The element types of tensors: names, sizes, and safetensors codes."""

from __future__ import annotations

from typing import NamedTuple


class DType(NamedTuple):
    """An element type: torch's name, safetensors' code (None if it has none), bytes per element, and kind.

    Kinds: f float, i signed, u unsigned, b bool, c complex, x other bits (quantized, packed).
    """

    name: str
    code: str | None
    itemsize: int
    kind: str

    def __str__(self) -> str:
        return self.name


# In the order of safetensors' ranking of its codes; the library writes the highest rank first.
_DTYPES = (
    DType("bool", "BOOL", 1, "b"),
    DType("float4_e2m1fn_x2", "F4", 1, "x"),  # two values a byte; safetensors counts values, torch bytes
    DType("uint8", "U8", 1, "u"),
    DType("int8", "I8", 1, "i"),
    DType("float8_e5m2", "F8_E5M2", 1, "f"),
    DType("float8_e4m3fn", "F8_E4M3", 1, "f"),
    DType("float8_e8m0fnu", "F8_E8M0", 1, "x"),  # powers of two that scale a block; no numbers by themselves
    DType("float8_e4m3fnuz", "F8_E4M3FNUZ", 1, "f"),
    DType("float8_e5m2fnuz", "F8_E5M2FNUZ", 1, "f"),
    DType("int16", "I16", 2, "i"),
    DType("uint16", "U16", 2, "u"),
    DType("float16", "F16", 2, "f"),
    DType("bfloat16", "BF16", 2, "f"),
    DType("int32", "I32", 4, "i"),
    DType("uint32", "U32", 4, "u"),
    DType("float32", "F32", 4, "f"),
    DType("complex64", "C64", 8, "c"),
    DType("float64", "F64", 8, "f"),
    DType("int64", "I64", 8, "i"),
    DType("uint64", "U64", 8, "u"),
    DType("complex32", None, 4, "c"),
    DType("complex128", None, 16, "c"),
    DType("bits8", None, 1, "x"),
    DType("bits16", None, 2, "x"),
    DType("bits1x8", None, 1, "x"),
    DType("bits2x4", None, 1, "x"),
    DType("bits4x2", None, 1, "x"),
    DType("qint8", None, 1, "x"),
    DType("quint8", None, 1, "x"),
    DType("qint32", None, 4, "x"),
    DType("quint4x2", None, 1, "x"),
    DType("quint2x4", None, 1, "x"),
)


DTYPES: dict[str, DType] = {d.name: d for d in _DTYPES}


DTYPES_BY_CODE: dict[str, DType] = {d.code: d for d in _DTYPES if d.code}


DTYPE_RANK: dict[str, int] = {d.name: rank for rank, d in enumerate(_DTYPES)}


def itemsize_of_components(dtype: DType) -> int:
    """Return the bytes of the unit that is byte-swapped in a big-endian file: a complex number consists of two."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


_CAST_FROM = frozenset(d.name for d in _DTYPES if d.kind == "f") | {"float8_e8m0fnu"}
# Dtypes whose numbers can be added up.
SUMMED = frozenset({"float64", "float32", "bfloat16", "float16"})
_CAST_TO = SUMMED


def can_cast(source: str, target: str) -> bool:
    """Return whether elements of dtype `source` can be cast to dtype `target`."""
    return source == target or (source in _CAST_FROM and target in _CAST_TO)


def is_differentiable(dtype: str) -> bool:
    """Return whether tensors of the dtype with this name can require gradients."""
    return dtype not in DTYPES or DTYPES[dtype].kind in "fc"
