"""What a user should know of an output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.formats.configs import UNCHANGED, Change
from ckptconv.tensors.lazy import Equal

if TYPE_CHECKING:
    from ckptconv.result import LikeReport


class Told(NamedTuple):
    """What a user should know of an output.

    `idle` are options that were given and change nothing in it: {option: reason}. `recorded` are the top-level keys of
    the structure record that lead to values. `inert`: it holds objects of classes known by name only, and no tensor
    outside them. `bits` are tensors that mean nothing without the record, which was not written. `kept` are the classes
    known by name only that the record names, if that may not be all of the source's; else None. `warnings` are any
    others; `notes` are no cause for concern. `like` says what was taken over from the reference. `map` is the record of
    the map that was applied, {} where --map none left the input's out, and `made_of` says of which tensors it made
    each. `change` is what a configuration is to say of the weights, and `quantized` how many were quantized, by format.
    `equal` are tensors of which the map kept one: they have to be equal.
    """

    idle: Mapping[str, str] = {}
    recorded: tuple[str, ...] = ()
    inert: bool = False
    bits: tuple[str, ...] = ()
    kept: frozenset[str] | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    like: LikeReport | None = None
    map: Mapping[str, Any] | None = None
    made_of: Mapping[str, Sequence[str]] = {}
    change: Change = UNCHANGED
    quantized: Mapping[str, int] = {}
    equal: Sequence[Equal] = ()


def idle_sentences(idle: Mapping[str, str]) -> Iterator[str]:
    """Yield options that change nothing, {option: reason}, each in a sentence."""
    for option, reason in idle.items():
        yield f"{option} {reason}" + ("" if reason.endswith((".", "?")) else ".")
