"""Reports as notebooks show them: HTML tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from itertools import islice
from typing import Any

from ckptconv.text import brief, format_size, some

# Tensors that a notebook lists.
ROWS = 50
_EMPTY: tuple[Any, ...] = (None, "", [], {}, ())


def shown(report: Any) -> str:
    """Return the fields of a report, a dataclass, as a table, and its tensors as another. Empty fields are left out."""
    rows = ((name.replace("_", " "), _cell(name, value)) for name, value in _filled(report).items())
    tensors = getattr(report, "tensors", None)
    return html_table(type(report).__name__, rows) + (_listed(tensors) if isinstance(tensors, list) else "")


def _listed(tensors: Sequence[Any]) -> str:
    """Return a table of the first of `tensors`, dataclasses: a column for each field and statistic that one has."""
    facts = [_facts(tensor) for tensor in islice(tensors, ROWS)]
    columns = list(dict.fromkeys(column for row in facts for column in row))
    rows = [[column.replace("_", " ") for column in columns]] if facts else []
    rows += [[row.get(column, "") for column in columns] for row in facts]
    if len(tensors) > ROWS:
        rows.append([f"{len(tensors) - ROWS:,} more tensors"])
    return html_table("tensors", rows) if rows else ""


def _facts(item: Any) -> dict[str, str]:
    """Return the filled fields of a dataclass, and those of dataclasses in it, as cells."""
    facts: dict[str, str] = {}
    for name, value in _filled(item).items():
        for inner, cell in (_facts(value) if is_dataclass(value) else {name: _fact(name, value)}).items():
            facts[f"{name} {inner}" if inner in facts else inner] = cell
    return facts


def _fact(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    is_shape = isinstance(value, (list, tuple)) and not any(isinstance(item, str) for item in value)
    return str([*value]) if is_shape else _cell(name, value)


def _filled(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not empty; a shape may be."""
    named = {one.name: getattr(item, one.name) for one in fields(item)}
    return {name: value for name, value in named.items() if value not in _EMPTY or name.endswith("shape")}


def html_table(caption: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table for notebooks. The first text of each row is its heading."""
    lines = (
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for first, *cells in rows
    )
    return f"<table><caption>{escape(caption)}</caption>{''.join(lines)}</table>"


def _cell(name: str, value: Any) -> str:
    """Return a field's value as a table shows it: of many items their number and the first, of bytes the size."""
    if isinstance(value, Mapping):
        value = [f"{key}: {_called(item)}" for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return some(value, form=_called)
    return format_size(value) if type(value) is int and "bytes" in name.split("_") else str(value)


def _called(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, Mapping):
        return some([f"{key}={_called(value)}" for key, value in item.items()], form=str) or "none"
    if named := getattr(item, "name", "") or getattr(item, "path", ""):
        return str(named)
    if is_dataclass(item):
        return " ".join(f"{name}={_cell(name, value)}" for name, value in _filled(item).items())
    return brief(item)
