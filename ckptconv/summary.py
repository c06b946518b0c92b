"""What is inside a checkpoint, as plain data: what `inspect` shows. Pure; no tensor data is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import keymap, select
from .formats.source import Source
from .tensors import LazyTensor


def summarize(source: Source) -> dict[str, Any]:
    """Format, facts, totals by dtype, every tensor with dtype, shape and bytes, ties, and classes met in pickles."""
    flat = keymap.flatten(source.weights)[0] if source.structured else dict(source.weights)
    aliases = select.untie(flat, source.owners)
    totals: dict[str, dict[str, int]] = {}
    for name, tensor in flat.items():
        if name not in aliases:
            total = totals.setdefault(tensor.dtype.name, {"tensors": 0, "elements": 0, "bytes": 0})
            total["tensors"] += 1
            total["elements"] += tensor.numel
            total["bytes"] += tensor.nbytes
    return {
        "format": source.format,
        "facts": source.facts,
        "counts": source.counts,
        "totals": totals,
        "tensors": list(_rows(flat)),
        "aliases": aliases,
        "opaque": source.opaque,
        "classes": source.mentioned,
        "warnings": source.warnings,
        "bytes_read": source.bytes_read,
    }


def _rows(flat: dict[str, LazyTensor]) -> Iterator[dict[str, Any]]:
    for name, tensor in flat.items():
        yield {"name": name, "dtype": tensor.dtype.name, "shape": list(tensor.shape), "bytes": tensor.nbytes}
