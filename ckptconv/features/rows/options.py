"""The options of the commands for rows, and of `split_rows`, `pack_rows` and `check_rows`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.options import NAMING, TAKE
from ckptconv.options.kinds import FLAG, MOST_ITEMS, TEXT, TEXTS, ValueKind, counted, dtype_name
from ckptconv.options.option import Given, Option, naming, options_in
from ckptconv.options.table import OPTIONS


def _names(value: Any, called: str) -> dict[str, str]:
    """Return {part: name} from a mapping, or from words such as weight=NAME."""
    if not isinstance(value, Mapping):
        value = dict(_named(text, called) for text in TEXTS.parse(value, called))
    return {TEXT.parse(part, called): TEXT.parse(name, called) for part, name in value.items()}


def _named(text: str, called: str) -> tuple[str, str]:
    part, equals, name = text.partition("=")
    if not (part and equals and name):
        raise UsageError(
            f"{called} {text!r} does not assign a tensor to a part.", "Use the form PART=TENSOR, such as weight=NAME."
        )
    return part, name


ROW_DTYPE = ValueKind(dtype_name, accepts="str | TorchDType")
_WORD = ValueKind(TEXT.parse)
_NAMES = ValueKind(_names, list[str], dict, unset={}, accepts=f"Mapping[str, str] | {TEXTS.accepts}")


class RowOptions(Given):
    """A user's options for the layout of rows; those left out are None, or are derived."""

    embedding_dim: int | None = naming(
        counted(1, MOST_ITEMS), "The number of weight items in a row.", metavar="D", common=True
    )
    method: str | None = naming(
        _WORD,
        "exact_row_wise_adagrad, partial_row_wise_adam, adam, row_wise_rmsprop_ar, or none.",
        metavar="NAME",
        common=True,
        former="--optimizer",
    )
    weight_dtype: str | None = naming(ROW_DTYPE, "float32 or float16.", metavar="DTYPE", fallback="the table's")
    momentum1_dtype: str | None = naming(
        ROW_DTYPE, "float32, float16 or bfloat16.", metavar="DTYPE", fallback="float32"
    )
    momentum2_dtype: str | None = naming(ROW_DTYPE, "As --momentum1-dtype.", metavar="DTYPE", fallback="float32")
    max_dim: int | None = naming(
        counted(1, MOST_ITEMS),
        "The embedding dimension D of the widest table of the same operator.",
        metavar="D",
        fallback="this table's",
    )

    @classmethod
    def take(cls, options: dict[str, Any]) -> RowOptions:
        """Remove the layout's options from `options`, and return them."""
        return cls(**{name: options.pop(name) for name in cls.table if name in options})


class _Rows:
    """Further options of the commands for rows."""

    names = Option(
        TEXTS,
        "The name of the table; repeat for its shards, in order.",
        flags=("--tensor",),
        metavar="NAME",
        group=TAKE,
        fallback="the only one",
        common=True,
    )
    decode = Option(
        FLAG, "Write the columns `timestamp`, `count` and `used` instead of `metadata`, which packs them.", group=NAMING
    )
    global_id_offset = Option(
        counted(1, (1 << 63) - 1),
        "The offset between global and local ids.",
        metavar="N",
        group=NAMING,
        fallback="the offset of most rows",
    )
    bucket_size = Option(
        counted(1, (1 << 63) - 1),
        "The number of ids in a bucket.",
        metavar="N",
        group=NAMING,
        fallback=("any size that all buckets share"),
    )


class _Packing:
    """Options that only `pack` has."""

    names = Option(
        _NAMES,
        "The tensor with PART of the rows; repeatable.",
        flags=("--column",),
        metavar="PART=NAME",
        group=TAKE,
        common=True,
        former="--part",
    )
    name = Option(TEXT, "The name of the table.", metavar="NAME", group=NAMING, common=True)


LAYOUT = RowOptions.table
# The options of a conversion, except the one that writes a model's optimizer states; its name was that of --method too.
CONVERTING = {name: option for name, option in OPTIONS.items() if name != "optimizer"}
ROWS = {**LAYOUT, **options_in(_Rows)}
PACKING = {**LAYOUT, **options_in(_Packing)}
# The name of the keywords' type, and its docstring.
KEYWORDS = {**CONVERTING, **LAYOUT}, "Options of `split_rows`, `pack_rows` and `check_rows`."
