"""Computes the places of the parts of a row. Pure.

FBGEMM's key-value embedding tables save header, weight and optimizer state of a row together ("whole rows"). Sources:
FBGEMM's `fixed_block_pool.h` for the header; for the rest `split_embedding_configs.py`, and the split optimizer states
of its key-value tables. All is little-endian:

    0   int64    key: the row's id
    8   uint32   Unix time of the last update
    12  uint32   bits 0 to 30: a count (or the bits of a score); bit 31: whether the row is used
    16  D items  weight
    …            optimizer state, then padding to 4 items

The width of a row does not determine its contents. The user must give embedding dimension, optimizer and dtypes; the
width is then checked exactly.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.features.rows.options import RowOptions
from ckptconv.storage import strict_json
from ckptconv.tensors.dtypes import DTYPES, DType

# The metadata entry that records the layout of rows that were split.
METADATA_KEY = "ckptconv.rows"
VERSION = 1
HEADER = 16
WEIGHT_DTYPES = ("float32", "float16")
STATE_DTYPES = ("float32", "float16", "bfloat16")
DEFAULT_STATE_DTYPE = "float32"
NO_OPTIMIZER = "none"
PAD = "pad"
# Weight and row are padded to a multiple of so many items; D is a multiple of it too.
_UNIT = 4
# An error for a width that does not fit names at most twice so many layouts.
_NAMED = 4


class State(NamedTuple):
    """A part of the optimizer's state in a row: one item or, if `wide`, D items.

    `dtype` is the name of its dtype, if that is fixed. The part after an `aligned` one begins at a multiple of four
    bytes.
    """

    name: str
    wide: bool
    dtype: str = ""
    aligned: bool = False


# The states of each optimizer, in the order of the row.
OPTIMIZERS: dict[str, tuple[State, ...]] = {
    "exact_row_wise_adagrad": (State("momentum1", wide=False, dtype="float32"),),
    "partial_row_wise_adam": (State("momentum2", wide=False, aligned=True), State("momentum1", wide=True)),
    "adam": (State("momentum1", wide=True), State("momentum2", wide=True)),
    "row_wise_rmsprop_ar": (State("momentum1", wide=False), State("prev_iter", wide=False, dtype="float32")),
    NO_OPTIMIZER: (),
}
# Other names of these optimizers.
_SHORT = {
    "adagrad": "exact_row_wise_adagrad",
    "exact_rowwise_adagrad": "exact_row_wise_adagrad",
    "partial_adam": "partial_row_wise_adam",
    "partial_rowwise_adam": "partial_row_wise_adam",
    "rmsprop": "row_wise_rmsprop_ar",
    "row_wise_rmsprop": "row_wise_rmsprop_ar",
    "rowwise_rmsprop_ar": "row_wise_rmsprop_ar",
}


class Field(NamedTuple):
    """A part of every row: `items` elements from byte `offset`, or one without its own dimension (None)."""

    name: str
    offset: int
    dtype: DType
    items: int | None

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * (1 if self.items is None else self.items)

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class RowLayout:
    """The layout of a row.

    Every row has room for the state of a row of `max_dim` items. Dtypes are names. Use `make`, which checks them.
    """

    embedding_dim: int
    """Items of weight in a row."""

    optimizer: str
    """The optimizer."""

    weight_dtype: str
    """The dtype of the weight."""

    momentum1_dtype: str
    """The dtype of the first state."""

    momentum2_dtype: str
    """The dtype of the second state."""

    max_dim: int
    """The embedding dimension of the widest table of the same operator."""

    @property
    def itemsize(self) -> int:
        return DTYPES[self.weight_dtype].itemsize

    @property
    def row_bytes(self) -> int:
        """The width of a row in bytes; always a multiple of 8."""
        return self.row_items * self.itemsize

    @property
    def row_items(self) -> int:
        """The width of a row in items of the weight's dtype."""
        *_, size = _place_states(self, self.max_dim)
        return HEADER // self.itemsize + _padded(self.embedding_dim) + _padded(-(-size // self.itemsize))

    @property
    def weight(self) -> Field:
        return Field("weight", HEADER, DTYPES[self.weight_dtype], self.embedding_dim)

    @property
    def states(self) -> list[Field]:
        """The optimizer's states, in the order of the row."""
        start = HEADER + _padded(self.embedding_dim) * self.itemsize
        states, _ = _place_states(self, self.embedding_dim)
        return [state._replace(offset=start + state.offset) for state in states]

    def fields(self, *, decode: bool = False) -> list[Field]:
        """Return the fields into which a row is split: id, rest of the header, weight, and optimizer state.

        The rest of the header is one number or, with `decode`, three. Of these, `count` and `used` share four bytes:
        `used` is their last bit.
        """
        return [Field("weight_id", 0, DTYPES["int64"], None), *_HEADERS[decode], self.weight, *self.states]

    def gaps(self) -> list[Field]:
        """Return the bytes that are in no field, in order. Together they are the pad."""
        gaps = []
        at = HEADER
        for start, stop in (*sorted((field.offset, field.stop) for field in (self.weight, *self.states)), _END):
            start = min(start, self.row_bytes)
            if at < start:
                gaps.append(Field(PAD, at, DTYPES["uint8"], start - at))
            at = stop
        return gaps

    @property
    def pad_bytes(self) -> int:
        """The number of bytes of a row that are in no field."""
        return sum(gap.nbytes for gap in self.gaps())

    def describe(self) -> str:
        """Return the layout as options of the command line."""
        kinds = {"momentum1": self.momentum1_dtype, "momentum2": self.momentum2_dtype}
        states = {state.name for state in OPTIMIZERS[self.optimizer] if not state.dtype}
        unusual = [
            f"--{name}-dtype {dtype}"
            for name, dtype in kinds.items()
            if name in states and dtype != DEFAULT_STATE_DTYPE
        ]
        wider = [f"--max-dim {self.max_dim}"] if self.max_dim != self.embedding_dim else []
        options = (f"--embedding-dim {self.embedding_dim}", f"--method {self.optimizer}", *unusual, *wider)
        return " ".join(options)


_END = (1 << 62, 1 << 62)
_HEADERS: dict[bool, tuple[Field, ...]] = {
    False: (Field("metadata", 8, DTYPES["int64"], None),),
    True: (
        Field("timestamp", 8, DTYPES["uint32"], None),
        Field("count", 12, DTYPES["uint32"], None),
        Field("used", 15, DTYPES["bool"], None),
    ),
}


def _padded(count: int, unit: int = _UNIT) -> int:
    return -(-count // unit) * unit


def _place_states(layout: RowLayout, dim: int) -> tuple[list[Field], int]:
    """Return the optimizer's states for embedding dimension `dim`, at offsets from the first, and their total bytes."""
    placed: list[Field] = []
    at = 0
    for state in OPTIMIZERS[layout.optimizer]:
        dtype = DTYPES[state.dtype or getattr(layout, f"{state.name}_dtype")]
        placed.append(Field(state.name, at, dtype, dim if state.wide else None))
        at = placed[-1].stop
        if state.aligned:
            at = _padded(at)
    return placed, at


# ---------------------------------------------------------------------------------------------------- the user's choice


def make(options: RowOptions, dtype: str) -> RowLayout:
    """Return the layout that `options` describe, for a table of `dtype`.

    Raises UsageError if something is missing or inconsistent, UnsupportedError for a layout that whole rows cannot
    have.
    """
    dim, optimizer = options.embedding_dim, optimizer_named(options.method) if options.method else None
    if dtype not in WEIGHT_DTYPES:
        raise UnsupportedError(
            f"Whole rows are float32 or float16, but this table is {dtype}.", "Select another tensor with --tensor."
        )
    if options.weight_dtype not in (None, dtype):
        raise UsageError(f"The table and its weights are {dtype}, but --weight-dtype is {options.weight_dtype}.")
    if dim is None or optimizer is None:
        lacking = "--embedding-dim" if dim is None else "--method"
        raise UsageError(f"{lacking} is missing, but the width of a row alone does not determine its layout.")
    if dim <= 0 or dim % _UNIT:
        raise UnsupportedError(
            f"The embedding dimension is {dim}, but rows are aligned, which requires a positive multiple of {_UNIT}."
        )
    max_dim = dim if options.max_dim is None else options.max_dim
    if max_dim < dim:
        raise UsageError(
            f"--max-dim {max_dim} is less than --embedding-dim {dim}, but must be the dimension of the widest table."
        )
    dtypes = {}
    for name in ("momentum1", "momentum2"):
        chosen = getattr(options, f"{name}_dtype")
        if chosen not in (None, *STATE_DTYPES):
            raise UsageError(f"--{name}-dtype {chosen} is not one of {', '.join(STATE_DTYPES)}.")
        state = next((state for state in OPTIMIZERS[optimizer] if state.name == name), None)
        fixed = state.dtype if state else ""
        if chosen and (state is None or fixed not in ("", chosen)):
            reason = f"{name} of {optimizer} is always {fixed}" if state else f"{optimizer} has no {name}"
            raise UsageError(f"--{name}-dtype {chosen}: {reason}.")
        dtypes[f"{name}_dtype"] = chosen or fixed or DEFAULT_STATE_DTYPE
    return RowLayout(dim, optimizer, dtype, max_dim=max_dim, **dtypes)


def optimizer_named(name: str) -> str:
    """Return FBGEMM's name of the optimizer `name`, which may be shorter, or "none". Raises UsageError for others."""
    plain = name.strip().lower().replace("-", "_")
    plain = _SHORT.get(plain, plain)
    if plain not in OPTIMIZERS:
        raise UsageError(f"--method {name!r} is not one of {', '.join(OPTIMIZERS)}.")
    return plain


def check_width(layout: RowLayout, items: int, where: str) -> None:
    """Raise UsageError if the rows of `where` are not as wide as those of `layout`, and name layouts that would fit."""
    if layout.row_items == items:
        return
    options = RowOptions(embedding_dim=layout.embedding_dim, method=layout.optimizer)
    raise UsageError(
        f"{where}: its rows have {items} items of {layout.weight_dtype}, but {layout.describe()} requires "
        f"{layout.row_items}.",
        could_be(items, layout.weight_dtype, options),
    )


def could_be(items: int, dtype: str, options: RowOptions) -> str:
    """Return a sentence that names layouts which rows of `items` elements of `dtype` may have, likeliest first."""
    fitting = candidates(items, dtype, options.embedding_dim)
    if not fitting:
        return f"No layout of whole rows has rows of {items} items of {dtype}, so this may be an ordinary table."
    # First those closest to the options, then those that are likeliest in general.
    like_asked = sorted(fitting, key=lambda layout: _unlikelihood(layout, options))
    likeliest = sorted(fitting, key=lambda layout: _unlikelihood(layout, RowOptions()))
    close = [layout for layout in like_asked if _unlikelihood(layout, options)[0] < _STRANGE][:_NAMED]
    named = list(dict.fromkeys((*close, *likeliest)))[: 2 * _NAMED]
    more = f"; or {len(fitting) - len(named)} more" if len(fitting) > len(named) else ""
    return f"It could be {'; '.join(layout.describe() for layout in named)}{more}."


def likeliest(items: int, dtype: str) -> RowLayout | None:
    """Return the likeliest layout of rows of `items` elements.

    None if an ordinary table of that width is likelier: embedding dimensions are round numbers.
    """
    rounder = [layout for layout in candidates(items, dtype) if _roundness(layout.embedding_dim) > _roundness(items)]
    return min(rounder, key=lambda layout: _unlikelihood(layout, RowOptions()), default=None)


def _roundness(dim: int) -> int:
    """Return the largest power of two that divides `dim`, at most 64: larger powers make no difference."""
    return min(dim & -dim, 64)


def candidates(items: int, dtype: str, dim: int | None = None) -> set[RowLayout]:
    """Return the possible layouts of rows of `items` elements of `dtype`.

    The widest table of the operator may be this one, or two or four times as wide. If the embedding dimension `dim` is
    given, it may also have any width.
    """
    layouts: set[RowLayout] = set()
    for optimizer, states in OPTIMIZERS.items():
        free = {state.name for state in states if not state.dtype}
        choices = [STATE_DTYPES if name in free else (DEFAULT_STATE_DTYPE,) for name in ("momentum1", "momentum2")]
        # The widest table matters only for a state that is as wide as the weight.
        factors = (1, 2, 4) if any(state.wide for state in states) else (1,)
        for first, second in itertools.product(*choices):
            kinds = (optimizer, dtype, first, second)
            families = [functools.partial(_beside_wider, kinds, factor) for factor in factors]
            if dim is not None and len(factors) > 1:
                families.append(functools.partial(_with_room, kinds, dim))
            layouts.update(layout for family in families if (layout := _fitting(family, items)) is not None)
    return layouts


def _beside_wider(kinds: tuple[str, str, str, str], factor: int, dim: int) -> RowLayout:
    return RowLayout(dim, *kinds, dim * factor)


def _with_room(kinds: tuple[str, str, str, str], dim: int, most: int) -> RowLayout:
    return RowLayout(dim, *kinds, max(most, dim))


def _fitting(family: Callable[[int], RowLayout], items: int) -> RowLayout | None:
    """Return the layout, among `family(dim)` for all `dim`, whose rows have `items` elements; they widen with `dim`."""
    dims = range(_UNIT, items + 1, _UNIT)
    at = bisect.bisect_left(dims, items, key=lambda dim: family(dim).row_items)
    layout = family(dims[at]) if at < len(dims) else None
    return layout if layout is not None and layout.row_items == items else None


# The number of differences from the options, in dimension and optimizer, at which a layout is not close to them.
_STRANGE = 2


def _unlikelihood(layout: RowLayout, options: RowOptions) -> tuple[int, ...]:
    """Sort key for layouts: those that fit the options, one width for all tables, usual dtypes, round numbers first."""
    differing = [
        options.embedding_dim not in (None, layout.embedding_dim),
        options.method is not None and optimizer_named(options.method) != layout.optimizer,
    ]
    kinds = (layout.momentum1_dtype, layout.momentum2_dtype)
    return (
        sum(differing),
        layout.max_dim != layout.embedding_dim,
        sum(STATE_DTYPES.index(kind) for kind in kinds),
        -_roundness(layout.embedding_dim),
        list(OPTIMIZERS).index(layout.optimizer),
        layout.embedding_dim,
    )


# --------------------------------------------------------------------------------------------------------- the record


def dump(layout: RowLayout, name: str) -> str:
    """Return the layout of the table `name` as JSON, for the metadata of the tensors into which it was split."""
    parts = [{"name": f.name, "offset": f.offset, "bytes": f.nbytes} for f in (*layout.fields(), *layout.gaps())]
    record = {"version": VERSION, "tensor": name, **vars(layout), "row_bytes": layout.row_bytes, "fields": parts}
    return json.dumps(record, separators=(",", ":"))


def parse(text: str, where: str) -> tuple[RowLayout, str]:
    """Parse the record `text` of a layout and a table's name.

    Raises CorruptError if it is malformed or contradicts itself, UnsupportedError for an unknown version.
    """
    try:
        record = strict_json.parse(text)
    except ValueError:
        record = None
    if type(record) is not dict:
        raise _malformed(where, "is not a JSON object")
    if record.get("version") != VERSION:
        raise UnsupportedError(
            f"{where}: the record of its row layout has version {str(record.get('version'))[:20]}, but this release "
            f"supports only version {VERSION}."
        )
    name = _member(record, "tensor", str, where)
    values: dict[str, Any] = {key: _member(record, key, kind, where) for key, kind in _MEMBERS.items()}
    if not all(0 < values[key] < 1 << 32 for key in ("embedding_dim", "max_dim")):
        raise _malformed(where, "has no plausible dimensions")
    try:
        layout = make(
            RowOptions(**{_OPTION.get(key, key): values[key] for key in _MEMBERS if key not in _unused(values)}),
            values["weight_dtype"],
        )
    except (UsageError, UnsupportedError) as error:
        raise _malformed(where, f"is not valid: {error.message}") from error
    if record.get("row_bytes") != layout.row_bytes:
        raise _malformed(
            where,
            f"specifies {str(record.get('row_bytes'))[:20]} bytes per row, but its parts require {layout.row_bytes}",
        )
    return layout, name


# The options with another name than in a record.
_OPTION = {"optimizer": "method"}
_MEMBERS: dict[str, type] = {
    "embedding_dim": int,
    "optimizer": str,
    "weight_dtype": str,
    "momentum1_dtype": str,
    "momentum2_dtype": str,
    "max_dim": int,
}


def _unused(values: Mapping[str, Any]) -> Sequence[str]:
    """Return the dtypes in the record that its optimizer does not use; every record has them."""
    states = {state.name for state in OPTIMIZERS.get(values["optimizer"], ())}
    return [f"{name}_dtype" for name in ("momentum1", "momentum2") if name not in states]


def _member(record: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    if type(record.get(key)) is not kind:
        raise _malformed(where, f"has no {key}")
    return record[key]


def _malformed(where: str, why: str) -> CorruptError:
    return CorruptError(f"{where}: the record of its row layout ({METADATA_KEY}) {why}.")
