"""Warnings and notes on an output whose weights have optimizers among them, as a training checkpoint has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ckptconv.formats.optimizers import key_to_add
from ckptconv.options.table import Options
from ckptconv.structure.record import Flattened
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.text import count_of


def told(
    optimizers: Sequence[str], names: Collection[str], described: Flattened, options: Options, tree: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return warnings and notes on the `optimizers`, which have these names in the `tree` that is `described`, "" if it
    is one itself. `names` are the tensors of it that the output has."""
    beginnings = tuple(f"{name}." if name else "" for name in optimizers)
    states = [name for name in names if name.startswith(beginnings)]
    without = " ".join(f"--exclude '{beginning}*'" for beginning in beginnings)
    without += f", or --key {key} for the weights alone" if (key := key_to_add(tree, options)) else ""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if cast := _narrowed(states, described, options.dtype or "keep"):
        which = "1 optimizer state is" if len(cast) == 1 else f"{len(cast):,} optimizer states are"
        other = f"also cast to {options.dtype}, such as {cast[0]!r}. To leave them out, use {without}."
        alone = f"cast to {options.dtype}, such as {cast[0]!r}. To keep their dtypes, leave --dtype out."
        warnings = (f"{which} {alone if len(states) == len(names) else other}",)
    if states and options.optimizer:
        held = count_of(len(states), "tensor")
        notes = (f"OUTPUT also contains the optimizer states ({held}). To leave them out, use {without}.",)
    return warnings, notes


def _narrowed(states: Sequence[str], described: Flattened, dtype: str) -> list[str]:
    """Return those of `states` that lose digits or range in a cast to `dtype`."""
    if dtype == "keep":
        return []
    goal = DTYPES[dtype]
    dtypes = {name: described.tensors[name].dtype for name in states if name not in described.uncastable}
    return [
        name
        for name, old in dtypes.items()
        if old.kind == "f" and old.name != goal.name and old.itemsize >= goal.itemsize and old.itemsize > 1
    ]
