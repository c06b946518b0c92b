"""Reports as notebooks show them: HTML tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ckptconv.text import brief, format_size, some


def shown(report: Any) -> str:
    """Return the fields of a report, a dataclass, as a table. Those that are empty are left out."""
    named: list[str] = list(getattr(report, "__dataclass_fields__", ()))
    fields = ((name, value) for name in named if (value := getattr(report, name)) not in (None, "", [], {}, ()))
    return html_table(type(report).__name__, ((name.replace("_", " "), _cell(name, value)) for name, value in fields))


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
        value = [f"{key}: {brief(item)}" for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return some(value, form=_called)
    return format_size(value) if type(value) is int and "bytes" in name.split("_") else str(value)


def _called(item: Any) -> str:
    return item if isinstance(item, str) else getattr(item, "name", "") or getattr(item, "path", "") or brief(item)
