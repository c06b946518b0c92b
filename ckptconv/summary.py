"""What is inside a checkpoint, as plain data: what `inspect` shows. Pure; no tensor data is read."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, TypeGuard

from ckptconv import keymap, select
from ckptconv.bits import STORED_AS
from ckptconv.formats.source import Source
from ckptconv.rows import tables
from ckptconv.tensors import LazyTensor, View

# So many of the largest tensors are named.
LARGEST = 10


def summarize(source: Source) -> dict[str, Any]:
    """Format, facts, totals by dtype, every tensor with dtype, shape and bytes, ties, and classes met in pickles.

    Tied tensors count once. `largest` names tensors by falling size.
    """
    tensors = keymap.flatten(source.weights)[0] if source.structured else source.weights
    # What safetensors has to store under another dtype is shown under its own.
    flat = {name: tensor.tensor if _is_view(tensor) else tensor for name, tensor in tensors.items()}
    aliases = select.untie(flat, source.owners)
    totals: dict[str, dict[str, int]] = {}
    for name, tensor in flat.items():
        if name not in aliases:
            total = totals.setdefault(tensor.dtype.name, {"tensors": 0, "elements": 0, "bytes": 0})
            total["tensors"] += 1
            total["elements"] += tensor.numel
            total["bytes"] += tensor.nbytes
    kept = (name for name in flat if name not in aliases)
    return {
        "format": source.format,
        "family": source.family,
        "facts": source.facts,
        "counts": source.counts,
        "elements": sum(total["elements"] for total in totals.values()),
        "bytes": sum(total["bytes"] for total in totals.values()),
        "totals": totals,
        "tensors": list(_rows(flat)),
        "largest": heapq.nlargest(LARGEST, kept, key=lambda name: flat[name].nbytes),
        "aliases": aliases,
        "opaque": source.opaque,
        "classes": source.mentioned,
        "tables": list(tables.notes(tables.contents(source))),
        "notes": [*source.notes, *source.hints],
        "warnings": source.warnings,
        "bytes_read": source.bytes_read,
    }


def _is_view(tensor: LazyTensor) -> TypeGuard[View]:
    return isinstance(tensor, View) and tensor.tensor.dtype.name in STORED_AS


def _rows(flat: dict[str, LazyTensor]) -> Iterator[dict[str, Any]]:
    for name, tensor in flat.items():
        yield {"name": name, "dtype": tensor.dtype.name, "shape": list(tensor.shape), "bytes": tensor.nbytes}
