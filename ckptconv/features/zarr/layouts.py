"""Reads how arrays of zarr are stored: shape, dtype, chunks, and codecs. Pure.

Source: the specifications of zarr 2 and 3 and of sharding_indexed; tensorstore/driver/{zarr,zarr3} for dtypes beyond
numpy's.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.compressed import packing
from ckptconv.features.joining.chunks import Shape
from ckptconv.pickles.numpy_dtypes import TORCH_NAMES
from ckptconv.storage import strict_json
from ckptconv.tensors.dtypes import DTYPES, DType, itemsize_of_components
from ckptconv.tensors.strides import MAX_BYTES, MAX_DIMS, contiguous_strides
from ckptconv.text import brief, some

DESCRIPTIONS = SECOND, THIRD = ".zarray", "zarr.json"
# Codecs that pack bytes, and the methods by which they are unpacked.
_METHODS = {"zstd": packing.FRAME, "crc32c": packing.CRC32C}
_ZSTD, _CRC32C = _METHODS
_NUMPY, _NUMBER = re.compile(r"([<>|])(\w{1,8})"), re.compile(r"\d{1,18}")
_Value = TypeVar("_Value")
_SEPARATOR, _CODECS = frozenset({".", "/"}), [{"name": str, "configuration?": dict}]
_SHAPES: dict[str, Any] = {
    SECOND: {
        "zarr_format": range(2, 3), "shape": [int], "chunks": [int], "dtype": object, "fill_value": object,
        "compressor": strict_json.OrNull(dict), "filters": strict_json.OrNull([dict]),
        "order": frozenset({"C", "F"}), "dimension_separator?": _SEPARATOR,
    },
    THIRD: {
        "zarr_format": range(3, 4), "node_type": frozenset({"array"}), "shape": [int], "data_type": object,
        "chunk_grid": {"name": frozenset({"regular"}), "configuration": {"chunk_shape": [int]}},
        "chunk_key_encoding": {"name": frozenset({"default", "v2"}), "configuration?": {"separator?": _SEPARATOR}},
        "codecs": _CODECS, "fill_value": object, "attributes?": dict, "dimension_names?": object,
        "storage_transformers?": (),
    },
}  # fmt: skip
# Configurations of codecs.
_OF_CODECS: dict[str, Any] = {
    "sharding_indexed": {
        "chunk_shape": [int], "codecs": _CODECS, "index_codecs": _CODECS, "index_location?": frozenset({"start", "end"})
    },
    "transpose": {"order": [int]},
    "bytes": {"endian?": frozenset({"little", "big"})},
}  # fmt: skip


class Index(NamedTuple):
    """The index of a shard: whether it is at the shard's start or end, and whether its CRC-32C follows it."""

    at_start: bool
    is_summed: bool


class Layout(NamedTuple):
    """The storage of an array. It is cut into values of the shape `chunk`. If these are `shards`, they are cut into
    chunks of the shape `inner`; otherwise `inner` is `chunk`. `key` has the parts of keys: their prefix, the separator
    of indices, and the key of an array without indices.

    The elements of a chunk lie in C order of its axes in `order`. If `swapped` is more than one, units of so many bytes
    are big-endian. `unpacking` are the methods that undo the codecs of bytes, the last codec's first. If `is_zero`,
    parts that are not stored are zeros, else they have another value.
    """

    where: str
    dtype: DType
    swapped: int
    shape: Shape
    chunk: Shape
    inner: Shape
    order: Shape
    unpacking: tuple[str, ...]
    shards: Index | None
    key: tuple[str, str, str]
    is_zero: bool

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that unpack a chunk, and check its elements."""
        return (*self.unpacking, packing.BOOLS) if self.dtype.name == "bool" else self.unpacking

    @property
    def nbytes(self) -> int:
        """The size of an unpacked chunk in bytes."""
        return math.prod(self.inner) * self.dtype.itemsize

    @property
    def stored(self) -> Shape:
        """The stored shape of a chunk."""
        return tuple(self.inner[axis] for axis in self.order)

    @property
    def strides(self) -> Shape:
        """The strides of a chunk, in elements."""
        stored = contiguous_strides(self.stored)
        return tuple(stored[self.order.index(axis)] for axis in range(len(self.inner)))

    def named(self, cell: Shape) -> str:
        """Return the key of the value at an index of the grid, below the array's name."""
        first, separator, alone = self.key
        return first + separator.join(map(str, cell)) if cell else alone

    def by_start(self, values: Mapping[str, _Value]) -> dict[Shape, _Value]:
        """Return the values of the array's keys by their first index in the array. Other keys are left out."""
        by_start: dict[Shape, _Value] = {}
        for key, value in values.items():
            cell = tuple(map(int, _NUMBER.findall(key)))[: len(self.shape)]
            start = tuple(map(operator.mul, cell, self.chunk))
            if len(cell) == len(self.shape) and self.named(cell) == key and all(map(operator.lt, start, self.shape)):
                by_start[start] = value
        return by_start


def layout_of(data: bytes, where: str, version: str) -> Layout:
    """Return the layout that the JSON `data` describes; `where` names the array.

    Raise CorruptError if it contradicts itself, UnsupportedError for a layout that is not supported.
    """
    try:
        description = strict_json.parse(data.decode(), constants=True, deepest=16)
        strict_json.check(description, _SHAPES[version], f"its {version}")
        layout = (_second if version == SECOND else _third)(description, where)
    except ValueError as error:
        raise CorruptError(f"{where} has an invalid zarr description: {error}.") from None
    shapes = layout.shape, layout.chunk, layout.inner
    if (
        len({*map(len, shapes)}) > 1
        or len(layout.shape) > MAX_DIMS
        or 0 in (*layout.chunk, *layout.inner)
        or any(map(operator.mod, layout.chunk, layout.inner))
        or any(math.prod(shape) * layout.dtype.itemsize >= MAX_BYTES for shape in shapes)
    ):
        raise CorruptError(
            f"{where} has an invalid layout: shape {brief(layout.shape)}, chunks {brief(layout.chunk)}, inner chunks "
            f"{brief(layout.inner)}."
        )
    return layout


def _second(fields: dict[str, Any], where: str) -> Layout:
    match = _NUMPY.fullmatch(fields["dtype"]) if type(fields["dtype"]) is str else None
    order, name = (match[1], TORCH_NAMES[match[2]]) if match and match[2] in TORCH_NAMES else ("", fields["dtype"])
    dtype, axes, compressor = _dtype(name, where), range(len(fields["shape"])), fields["compressor"]
    _packings([{"name": codec.get("id")} for codec in fields["filters"] or ()], where, ())
    return Layout(
        where,
        dtype,
        itemsize_of_components(dtype) if order == ">" else 1,
        tuple(fields["shape"]),
        tuple(fields["chunks"]),
        tuple(fields["chunks"]),
        tuple(axes if fields["order"] == "C" else reversed(axes)),
        _packings([{"name": compressor.get("id")}] if compressor else [], where, (_ZSTD,)),
        None,
        ("", fields.get("dimension_separator", "."), "0"),
        fields["fill_value"] is None or _is_zero(fields["fill_value"]),
    )


def _third(fields: dict[str, Any], where: str) -> Layout:
    chunk = inner = tuple(fields["chunk_grid"]["configuration"]["chunk_shape"])
    dtype, encoding = _dtype(fields["data_type"], where), fields["chunk_key_encoding"]
    codecs, index = fields["codecs"], None
    if codecs and codecs[0]["name"] == "sharding_indexed":
        _packings(codecs[1:], where, ())
        settings = _configured(codecs[0])
        codecs, inner = settings["codecs"], tuple(settings["chunk_shape"])
        names = [codec["name"] for codec in settings["index_codecs"]]
        if names not in (["bytes"], ["bytes", _CRC32C]) or _swapped(settings["index_codecs"][0], 8, where) > 1:
            raise UnsupportedError(
                f"{where} has shards with an index that is packed by {brief(names)}, which is not supported."
            )
        index = Index(settings.get("index_location") == "start", _CRC32C in names)
    order = tuple(range(len(chunk)))
    while codecs and codecs[0]["name"] == "transpose":
        axes = _configured(codecs[0])["order"]
        if sorted(axes) != sorted(order):
            raise ValueError(f"its codec transpose has the invalid order {brief(axes)}")
        order, codecs = tuple(order[axis] for axis in axes), codecs[1:]
    if not codecs or codecs[0]["name"] != "bytes":
        names = [codec["name"] for codec in codecs]
        raise UnsupportedError(
            f"{where} is packed by {some(names) if names else 'no codec'}, but the codec 'bytes' was expected first."
        )
    is_own = encoding["name"] == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if is_own else ".")
    return Layout(
        where,
        dtype,
        _swapped(codecs[0], itemsize_of_components(dtype), where),
        tuple(fields["shape"]),
        chunk,
        inner,
        order,
        _packings(codecs[1:], where, (_ZSTD, _CRC32C)),
        index,
        (f"c{separator}", separator, "c") if is_own else ("", separator, "0"),
        _is_zero(fields["fill_value"]),
    )


def _swapped(codec: dict[str, Any], size: int, where: str) -> int:
    """Return the size of units of `size` bytes if the codec `bytes` stores them big-endian; 1 if not."""
    order = _configured(codec).get("endian")
    if order is None and size > 1:
        raise CorruptError(f"{where} does not specify its byte order: its codec bytes has no endian.")
    return size if order == "big" else 1


def _configured(codec: dict[str, Any]) -> dict[str, Any]:
    """Return the checked configuration of a codec."""
    settings: dict[str, Any] = codec.get("configuration", {})
    strict_json.check(settings, _OF_CODECS[codec["name"]], f"its codec {codec['name']}")
    return settings


def _packings(codecs: Sequence[dict[str, Any]], where: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the methods that undo codecs, the last one's first. Raise UnsupportedError for an unknown codec."""
    odd = [codec["name"] for codec in codecs if codec["name"] not in known]
    if odd:
        raise UnsupportedError(
            f"{where} is packed by {brief(odd[0])}, which is not supported.",
            "Save it again with Orbax's default settings.",
        )
    return tuple(_METHODS[codec["name"]] for codec in reversed(codecs))


def _dtype(name: Any, where: str) -> DType:
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None or not (dtype.code or dtype.kind == "c") or dtype.name.endswith("_x2"):
        raise UnsupportedError(
            f"{where} has elements of {brief(name)}, which tensors do not support.", "Use --key to select other arrays."
        )
    return dtype


def _is_zero(fill: Any) -> bool:
    """Return whether a value is zero: a number, or the parts of a complex one."""
    parts = fill if isinstance(fill, list) and len(fill) == 2 else [fill]
    return all(type(part) in (bool, int, float) and str(part) in ("False", "0", "0.0") for part in parts)
