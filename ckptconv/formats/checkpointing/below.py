"""Steps of torch_checkpointing below the named directory, as that of a run."""

from __future__ import annotations

from ckptconv.formats.checkpointing.locate import FAMILY, GUESS, locate, read
from ckptconv.formats.format import Guess, Probe
from ckptconv.formats.runs import holds_whole

__all__ = ["FAMILY", "read", "sniff"]


def sniff(probe: Probe) -> Guess | None:
    """Recognize a step below a directory with nothing else in it."""
    if not probe.is_directory or holds_whole(probe.place.names):
        return None
    return GUESS if locate(probe.place) else None
