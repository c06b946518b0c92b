"""Checkpoints with a file for each rank that the names in a directory do not tell: below it, in a run's or a step's
directory, or in it, under names that have only a number.
"""

from __future__ import annotations

from ckptconv.formats.format import Guess, Probe
from ckptconv.formats.ranks.locate import FAMILY, GUESS, holds_parts, locate, read
from ckptconv.formats.runs import holds_whole

__all__ = ["FAMILY", "read", "sniff"]


def sniff(probe: Probe) -> Guess | None:
    """Recognize a checkpoint in or below a directory with nothing else in it."""
    if probe.expected not in ("", FAMILY) or not probe.is_directory:
        return None
    place = probe.place
    if holds_whole(place.names):
        return None
    return GUESS if locate(place) or holds_parts(place) else None
