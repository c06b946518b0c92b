"""DeepSpeed checkpoints in the named directory: that of a run, as Lightning writes it."""

from __future__ import annotations

from ckptconv.formats.deepspeed.locate import FAMILY, GUESS, checkpoints_in, read
from ckptconv.formats.format import Guess, Probe
from ckptconv.formats.runs import holds_whole

__all__ = ["FAMILY", "read", "sniff"]


def sniff(probe: Probe) -> Guess | None:
    """Recognize the only checkpoint in a directory that holds no other."""
    if probe.expected or not probe.is_directory:
        return None
    place = probe.place
    return GUESS if not holds_whole(place.names) and len(checkpoints_in(place)) == 1 else None
