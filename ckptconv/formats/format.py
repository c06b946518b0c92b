"""What a format is, to whoever opens a checkpoint: the module of ours, or of another package, that reads it."""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

from ckptconv.formats.source import Source, Wanted
from ckptconv.storage.location import Location

# How sure a format is. CERTAIN: nobody else need be asked. LIKELY: it reads this, unless another of ours is certain.
# POSSIBLE: it reads this, unless anybody else does.
CERTAIN, LIKELY, POSSIBLE = 3, 2, 1
# So much of the beginning of a file is looked at.
HEAD = 512


class Guess(NamedTuple):
    """How sure a format is that what it was shown is its own; what people call that, as in "a DeepSpeed checkpoint";
    and the command that converts it, with {} for the path.

    `also` are families whose commands take it too. `place` is what is meant, where that is not what was named.
    """

    sure: int
    called: str
    command: str
    also: tuple[str, ...] = ()
    place: Location | None = None


class Probe:
    """What is under a path. Each thing is looked at once, and only when it is asked for.

    `expected` is the family that the caller expects: where things of several are there, it is meant.
    """

    def __init__(self, place: Location, expected: str = "") -> None:
        self.place = place
        self.expected = expected

    @functools.cached_property
    def is_file(self) -> bool:
        return self.place.kind == "file"

    @functools.cached_property
    def is_directory(self) -> bool:
        return self.place.kind == "directory"

    @functools.cached_property
    def head(self) -> tuple[bytes, int]:
        """The first bytes of a file, HEAD of them if it has as many, and its size."""
        reader = self.place.open_reader()
        try:
            return reader.read_at(0, min(reader.file.size, HEAD)), reader.file.size
        finally:
            reader.close()


class Format(Protocol):
    """A format. For each path, `sniff` is called first, of one format after the other until one is CERTAIN; then, once,
    `read` of the surest; of those that are equally sure, of the first.

    `FAMILY` is its name: callers ask for it by that, and its sources have it as their `family`. A module that is asked
    for every path is quick to import: what only `read` needs, `read` imports.
    """

    FAMILY: str

    def sniff(self, probe: Probe) -> Guess | None:
        """How sure it is that it reads this, and what that is called; None where it does not.

        Raises a CkptconvError for what stands for no checkpoint under the name that it has.
        """

    def read(self, place: Location, wanted: Wanted) -> Source:
        """Open the checkpoint at `place`: the descriptions of all that is `wanted`, and no tensor data."""
