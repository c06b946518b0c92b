"""Checkpoints with a file for each rank below the named directory: in a run's directory, or a step's."""

from __future__ import annotations

from ckptconv.formats.format import Guess, Probe
from ckptconv.formats.ranks.locate import FAMILY, GUESS, holds_whole, locate, read

__all__ = ["FAMILY", "read", "sniff"]


def sniff(probe: Probe) -> Guess | None:
    """Recognize a checkpoint below a directory with nothing else in it."""
    if probe.expected not in ("", FAMILY) or not probe.is_directory:
        return None
    return GUESS if not holds_whole(probe.place) and locate(probe.place) else None
