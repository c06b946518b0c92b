"""The output of `maps` with --json, for its schema (`scripts/schemas.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from ckptconv.features.maps.checking import MapSummary

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class Maps(TypedDict):
    """The output of `maps`, `maps show` and `maps check` with `--json`."""

    maps: Sequence[MapSummary]
    """The maps that come with ckptconv; of `maps show` and `maps check`, the one that was named."""

    text: NotRequired[str]
    """The whole map, in TOML; with `maps show`."""

    precedence: NotRequired[Sequence[tuple[str, str]]]
    """Pairs of rules; the first has the names that both have, as it is more special. With `maps check`."""

    source: NotRequired[str | None]
    """The checkpoint that it was tried on; null for none. With `maps check`."""

    direction: NotRequired[tuple[str, str]]
    """The side that the checkpoint's names are of, and the side to make; with `maps check` and a checkpoint."""

    made_of: NotRequired[Mapping[str, Sequence[str]]]
    """The input tensors of each output tensor; with `maps check` and a checkpoint."""

    warnings: NotRequired[Sequence[str]]
    """Warnings about tensors that the map leaves out, one sentence each; with `maps check` and a checkpoint."""


# The object: title, what prints it, the commands, and the class of its fields.
COMMANDS = {"maps": ("maps", "", ("maps", "maps show", "maps check"), Maps)}
# Constraints that the type of a field does not show.
MORE: dict[tuple[type, str], dict[str, Any]] = {(MapSummary, "rules"): {"type": "integer", "minimum": 1}}
