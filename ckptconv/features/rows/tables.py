"""Finds the tables of whole rows in a checkpoint, and the tensors that belong to them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.features.rows.layout import METADATA_KEY, WEIGHT_DTYPES, RowLayout, check_width, could_be, likeliest, make
from ckptconv.features.rows.options import RowOptions
from ckptconv.formats.detect import open_source
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.pickles import nodes
from ckptconv.structure import keymap
from ckptconv.tensors.lazy import Concat, LazyTensor
from ckptconv.text import some

# FBGEMM's and TorchRec's names for embedding tables; the tensors next to a table share the prefix.
_TABLE = re.compile(r"(?P<prefix>.*(?:^|\.)(?:embeddings|embedding_bags)\.(?P<table>[^.]+)\.)weight")
# Tensors next to a key-value back end's table: ids by bucket, the number in each, and a part of each row's header.
COMPANIONS = ("weight_id", "bucket", "metadata")
# Handles of such a back end, which are pickled without the data behind them.
_HANDLES = ("PartiallyMaterializedTensor", "KVTensorWrapper")
_SHOWN = 8


@dataclass
class RowsContents:
    """The content of an opened checkpoint: tensors by name, and the handles without data here, {name: class}."""

    path: str
    tensors: dict[str, LazyTensor]
    handles: dict[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


class RowTable(NamedTuple):
    """A table of whole rows: its name, its tensor [N, items], and the tensors saved next to it, by kind."""

    name: str
    tensor: LazyTensor
    beside: dict[str, LazyTensor]


def contents(source: Source) -> RowsContents:
    """Return the tensors of `source` by name."""
    handles: dict[str, str] = {}

    def leave_out(name: str, node: Any) -> bool:
        cls = nodes.class_of(node)
        if cls.endswith(_HANDLES):
            handles[name] = cls
        return bool(cls)

    if source.structured:
        tensors = keymap.describe(source.weights, leave_out=leave_out).tensors
    else:
        tensors = dict(source.weights)
    return RowsContents(source.path, tensors, handles, source.metadata)


def names_of_tables(names: Iterator[str] | Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Return the `names` that are those of embedding tables."""
    return [name for name in names if _TABLE.fullmatch(name)]


def notes_of(source: Source) -> Iterator[str]:
    """Yield notes on the tables of `source` for the user."""
    return notes(contents(source))


def notes(content: RowsContents) -> Iterator[str]:
    """Yield notes on the tables for the user: which may have whole rows, which are handles without data, and whether
    the checkpoint is a split table."""
    for name in [name for name in names_of_tables(content.tensors) if "weight_id" in _beside(content, name)]:
        tensor = content.tensors[name]
        if len(tensor.shape) != 2 or tensor.dtype.name not in WEIGHT_DTYPES:
            continue
        layout = likeliest(tensor.shape[1], tensor.dtype.name)
        if layout is not None:
            yield (
                f"{name} may have whole rows of {layout.row_bytes} bytes. If it does, split them: ckptconv rows split "
                f"{layout.describe()} --tensor {name} {content.path} OUTPUT"
            )
    for name, cls in content.handles.items():
        yield f"{name} is a {cls.rpartition('.')[2]}, a handle of a database: this file does not contain the rows"
    if METADATA_KEY in content.metadata:
        yield f"a table of whole rows that was split; to join its parts: ckptconv rows pack {content.path} OUTPUT"


def choose(content: RowsContents, names: Sequence[str]) -> RowTable:
    """Return the table that is meant: the tensors `names` joined in order, or the only table.

    Raise UsageError for an unknown name or an ambiguous choice, UnsupportedError for a tensor that is not a table or a
    table without data.
    """
    names = list(names) or [_only(content)]
    for name in names:
        if name in content.handles:
            raise _handle(content, name)
        if name not in content.tensors:
            others = names_of_tables(content.tensors) or list(content.tensors)
            raise UsageError(f"{content.path} has no tensor {name!r}.", f"It has {_listed(others)}.")
    tables = [RowTable(name, content.tensors[name], _beside(content, name)) for name in names]
    return join(tables, content.path)


def _only(content: RowsContents) -> str:
    """Return the name of the only table."""
    rows = [name for name, tensor in content.tensors.items() if len(tensor.shape) == 2]
    tables = names_of_tables(rows)
    if not tables and content.handles:
        raise _handle(content, next(iter(content.handles)))
    tables = tables or [name for name in rows if content.tensors[name].dtype.name in WEIGHT_DTYPES]
    if not tables:
        raise UsageError(f"{content.path} contains no table (no tensor with two dimensions).")
    if len(tables) > 1:
        raise UsageError(
            f"{content.path} contains {len(tables)} tables: {_listed(tables)}.",
            "Select the table with --tensor, once for each of its shards.",
        )
    return tables[0]


def _handle(content: RowsContents, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{content.path}: {name!r} is a {content.handles[name]}: a handle of the database that stored the table during "
        "training. This file does not contain the rows.",
        "Save the table with its rows: read the tensors of its state dict from the handle.",
    )


def join(tables: Sequence[RowTable], where: str) -> RowTable:
    """Join a table's shards. Raise UnsupportedError for a tensor that is no table of rows, or for different widths."""
    for name, tensor, _ in tables:
        if len(tensor.shape) != 2:
            raise UnsupportedError(
                f"{where}: {name!r} has the shape {list(tensor.shape)}, but a table of rows has two dimensions."
            )
        if tensor.dtype.name not in WEIGHT_DTYPES:
            raise UnsupportedError(
                f"{where}: {name!r} is {tensor.dtype}, but whole rows are float32 or float16.",
                "Select another tensor with --tensor.",
            )
    first = tables[0]
    if len(tables) == 1:
        return first
    for table in tables[1:]:
        if (table.tensor.dtype, table.tensor.shape[1]) != (first.tensor.dtype, first.tensor.shape[1]):
            raise UnsupportedError(
                f"{where}: the shards of a table must have rows of the same width, but {first.name!r} has "
                f"{first.tensor.shape[1]} items of {first.tensor.dtype}, and {table.name!r} has "
                f"{table.tensor.shape[1]} of {table.tensor.dtype}.",
                "Split tables of different widths separately.",
            )
    beside: dict[str, LazyTensor] = {
        kind: Concat(tuple(table.beside[kind] for table in tables))
        for kind in first.beside
        if all(_fits(table.beside.get(kind), first.beside[kind]) for table in tables)
    }
    return RowTable(first.name, Concat(tuple(table.tensor for table in tables)), beside)


def _fits(companion: LazyTensor | None, first: LazyTensor) -> bool:
    return (
        companion is not None
        and (companion.dtype, companion.shape[1:]) == (first.dtype, first.shape[1:])
        and bool(companion.shape)
    )


def _beside(content: RowsContents, name: str) -> dict[str, LazyTensor]:
    """Return the tensors that were saved next to the table `name`, by the back end's names."""
    match = _TABLE.fullmatch(name)
    if not match:
        return {kind: content.tensors[kind] for kind in COMPANIONS if kind in content.tensors}
    beside = {kind: f"{match['prefix']}{kind}" for kind in COMPANIONS}
    for state in ("momentum1", "momentum2"):
        ending = f"{match['table']}.{state}"
        ends = [key for key in content.tensors if key == ending or key.endswith(f".{ending}")]
        if len(ends) == 1:
            beside[state] = ends[0]
    return {kind: content.tensors[key] for kind, key in beside.items() if key in content.tensors}


def _listed(names: Sequence[str]) -> str:
    return some(names, _SHOWN) if names else "none at all"


def layout_of(table: RowTable, options: RowOptions, where: str) -> RowLayout:
    """Return the layout of `table` that `options` describe. Raise UsageError if the table cannot have it."""
    items, dtype = table.tensor.shape[1], table.tensor.dtype.name
    try:
        layout = make(options, dtype)
    except UsageError as error:
        if error.hint:
            raise
        raise UsageError(f"{where}: {error.message}", could_be(items, dtype, options)) from error
    check_width(layout, items, f"{where}: {table.name!r}")
    return layout


# ----------------------------------------------------------------------------------------------------------- opening


def open_table(paths: Sequence[str], names: Sequence[str], options: Options) -> tuple[list[Source], RowTable]:
    """Open checkpoints, find the table that is meant in each, and join them in order."""
    sources = open_all(paths, options)
    tables = [choose(contents(source), names) for source in sources]
    return sources, join(tables, paths[0])


def open_all(paths: Sequence[str], options: Options) -> list[Source]:
    """Open the checkpoints at `paths`."""
    return [open_source(path, **options.reaching()) for path in paths]
