"""The page that shows the contents of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ckptconv.features.inspect.summary import Summary, shown_fact, shown_value
from ckptconv.features.reporting.page import numbers, page_with, tensors_of
from ckptconv.features.reporting.statistics import Statistics
from ckptconv.text import printable


def page_of(summary: Summary) -> str:
    """Return the page that shows `summary`."""
    name = printable(summary.input)
    return page_with(name, _data_of(name, summary))


def _data_of(path: str, summary: Summary) -> dict[str, Any]:
    """Return the data for the page's script."""
    conversion = summary.conversion
    return {
        **tensors_of(summary.tensors, summary.aliases),
        "path": path,
        "format": summary.format,
        "facts": [[key, shown_fact(key, value)] for key, value in summary.facts.items()],
        "counts": [[printable(kind), f"{count:,}"] for kind, count in summary.counts.items()],
        "totals": [[n, total.tensors, total.elements, total.bytes] for n, total in summary.totals.items()],
        "stats": [_numbers(row.stats) for row in summary.tensors] if summary.not_finite is not None else None,
        "values": [[printable(name), shown_value(value)] for name, value in summary.values.items()],
        "opaque": list(map(printable, summary.opaque)),
        "classes": [printable(name) for name in summary.classes if name not in summary.opaque],
        "notes": list(map(printable, [*summary.notes, *summary.tables])),
        "warnings": list(map(printable, summary.warnings)),
        "conversion": conversion
        and {**asdict(conversion), "files": len(conversion.files), "command": printable(conversion.command)},
    }


def _numbers(stats: Statistics | None) -> list[Any] | None:
    return None if stats is None else numbers(asdict(stats).values())
