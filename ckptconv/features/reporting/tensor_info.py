"""A tensor, as reports and pages list it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptconv.features.reporting.statistics import Statistics


@dataclass(slots=True)
class TensorInfo:
    """A tensor."""

    name: str
    """Its name."""

    dtype: str
    """Its dtype, such as bfloat16."""

    shape: tuple[int, ...]
    """Its shape."""

    bytes: int
    """Its size."""

    stats: Statistics | None = None
    """Statistics of its values, with --stats; null for dtypes that are not numeric. A tied name has its tensor's."""
