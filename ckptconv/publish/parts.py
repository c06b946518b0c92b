"""Conversions in parts: a process makes some files of its outputs and leaves them staged, until another publishes all.

Features divide the work; `Part` is their interface to publishing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from ckptconv.options.table import Options
from ckptconv.outputs.kinds import is_set
from ckptconv.storage.paths import is_remote

if TYPE_CHECKING:
    from ckptconv.outputs.planning import Output
    from ckptconv.plan import FilePlan

# The modules with `part_of`, which returns the part of an option's value, by the option.
PARTS: dict[str, str] = {
    "part": "ckptconv.features.parts.making",
}


class Part(Protocol):
    """A part of a conversion.

    `name` is that in reports. The one that `is_first` compares tensors that are stored twice. `check` raises UsageError
    for outputs or options that parts cannot have, and warns if parts replace files at once. `files_of` returns the
    files to make of an output, given its place among the outputs; `described` the description in its staging for the
    process that publishes it, given its inputs by name, and its permissions.
    """

    @property
    def name(self) -> str: ...
    @property
    def is_first(self) -> bool: ...
    def check(self, outputs: Sequence[Output], options: Options, verifies: bool, replaces: bool) -> None: ...
    def files_of(self, output: Output, index: int) -> list[FilePlan]: ...
    def described(self, output: Output, index: int, inputs: Mapping[str, Any], permissions: Sequence[str]) -> bytes: ...


def part_of(options: Options) -> Part | None:
    """Return the part of a conversion that `options` ask for; None for the whole."""
    for option, module in PARTS.items():
        if is_set(option, options):
            part: Part = import_module(module).part_of(getattr(options, option))
            return part
    return None


def files_of(outputs: Sequence[Output], part: Part | None) -> list[list[FilePlan]]:
    """Return the files of each output to make now: all, or those of one part."""
    return [part.files_of(output, index) if part else list(output.plan.files) for index, output in enumerate(outputs)]


def is_one_upload(output: Output) -> bool:
    """Return whether a remote output is one file: it is complete once it has its name, while shards need an index."""
    index = output.target.last
    has_index = output.target.is_tree or any(file.name == index for file in output.plan.files)
    return is_remote(output.target.path) and not has_index
