"""The output of `serve` with --json, for its schema (`scripts/schemas.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class Serving(TypedDict):
    """The line that `serve --json` prints once it listens."""

    input: str
    """The checkpoint that the files are made from."""

    url: str
    """The URL of the files, without their names."""

    files: Mapping[str, int]
    """The files and their sizes in bytes: {name: bytes}."""

    warnings: Sequence[str]
    """Warnings, one sentence each."""

    notes: Sequence[str]
    """Notes, one sentence each."""


# Title, description, the commands, the class of the fields; then: whether the fields stand next to `ok`, and the
# meaning of `ok`.
COMMANDS = {"serve": ("serve", "", ("serve",), Serving, "", True, "It listens.")}
