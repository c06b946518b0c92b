"""The notices about an output: warnings, notes, idle options, and changes for a configuration next to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.tensors.lazy import Equal


class Change(NamedTuple):
    """The changes that an output makes to a configuration. `dtype` is that to which weights were cast, "" for none.
    With `plain`, the weights are no longer quantized; with `quantization`, they are quantized as that describes.
    `edit` returns the configuration that is true of the tensors, where they are others than those of the input."""

    dtype: str = ""
    plain: bool = False
    quantization: Mapping[str, Any] | None = None
    edit: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None


UNCHANGED = Change()


class Notices(NamedTuple):
    """The notices about an output, for the user and for its report.

    `idle` are options that were given and change nothing in it: {option: reason}. `recorded` are the top-level keys of
    the structure record that lead to values. `inert`: it holds objects of classes known by name only, and no tensor
    outside them. `bits` are tensors that mean nothing without the record, which was not written. `kept` are the classes
    known by name only that the record names, if that may not be all of the source's; else None. `warnings` are any
    others; `notes` are no cause for concern. `change` is the statement of a configuration about the weights. `record`
    is the record of their selection in the manifest, and `reported` are its fields in a report. `equal` are tensors of
    which one was kept: they have to be equal.
    """

    idle: Mapping[str, str] = {}
    recorded: tuple[str, ...] = ()
    inert: bool = False
    bits: tuple[str, ...] = ()
    kept: frozenset[str] | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    change: Change = UNCHANGED
    record: Mapping[str, Any] = {}
    reported: Mapping[str, Any] = {}
    equal: Sequence[Equal] = ()


def idle_sentences(idle: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each option that changes nothing, {option: reason}."""
    for option, reason in idle.items():
        yield f"{option} {reason}" + ("" if reason.endswith((".", "?")) else ".")
