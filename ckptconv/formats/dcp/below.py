"""DCP checkpoints below the named directory: in a run's directory, or a step's."""

from __future__ import annotations

from ckptconv.formats.dcp.locate import FAMILY, GUESS, locate, read
from ckptconv.formats.format import Guess, Probe
from ckptconv.formats.ranks import locate as ranks
from ckptconv.formats.runs import SHARDED, holds_whole, is_of_optimizer

__all__ = ["FAMILY", "read", "sniff"]


def sniff(probe: Probe) -> Guess | None:
    """Recognize a checkpoint below a directory with nothing else in it, or shards beside a set made from them."""
    if probe.expected or not probe.is_directory:
        return None
    names = probe.place.names
    alone = SHARDED in names or not holds_whole(names)
    found = locate(probe.place) if alone else None
    # The model of an optimizer that was saved so may be in a file for each rank, as accelerate writes it.
    if found is None or (is_of_optimizer(found.directory.name) and ranks.holds_parts(found.directory.parent)):
        return None
    return GUESS
