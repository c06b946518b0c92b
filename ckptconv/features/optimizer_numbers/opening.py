"""A source is opened with the order of its parameters that the user gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.features.optimizer_states.numbering import NAMED, Order
from ckptconv.formats.source import Source
from ckptconv.storage.paths import normalize


def orders(asked: Mapping[str, Any], reaching: Mapping[str, Any]) -> tuple[Order, ...]:
    """Return the order in the file that the options `asked` name."""
    from ckptconv.features.optimizer_numbers.order_files import order_at

    return (order_at(normalize(asked["order"]), reaching),)


def warned(sources: list[Source]) -> list[Source]:
    """Return `sources`, with a warning if the order changed none of them."""
    if any(note.startswith(NAMED) for source in sources for note in source.notes):
        return sources
    idle = "--order has no effect: the input contains no numbered optimizer states."
    return [source._replace(warnings=[*source.warnings, idle]) for source in sources]
