"""The properties that an output takes over from its reference, for reports."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LikeRow:
    """A tensor of an output that is like a reference."""

    tensor: str
    """Its name in the output."""

    dtype: str
    """Its dtype in the output."""

    file: str
    """The name of its file."""

    source: str | None
    """Its name in the input; null if it is taken from the reference."""

    source_dtype: str
    """Its dtype there."""


@dataclass
class LikeReport:
    """The properties that an output takes over from its reference."""

    reference: str
    """The path or URL of the reference; on the hub, with the commit that it was read at."""

    matched: int
    """Tensors of the reference that the input gives."""

    missing: list[str]
    """Tensors of the reference that the output leaves out, with --partial."""

    filled: list[str]
    """Tensors that were taken from the reference, with --fill."""

    casts: dict[str, int]
    """Number of tensors cast, by dtypes: {"float32 to bfloat16": count}."""

    tensors: list[LikeRow] = field(default_factory=list)
    """The tensors of the output; with --dry-run only."""
