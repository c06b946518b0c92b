"""The interface of a format: a module, ours or another package's, that reads a kind of checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from ckptconv.formats.source import Source, Wanted
    from ckptconv.storage.location import Location

# The degrees of certainty. CERTAIN: no other format is asked. LIKELY: it reads this path, unless another of ours is
# certain. POSSIBLE: it reads this path, unless any other does.
CERTAIN, LIKELY, POSSIBLE = 3, 2, 1
# Bytes of the beginning of a file that formats look at.
HEAD = 512


class Guess(NamedTuple):
    """A format's answer for a path: how sure it is; the name for people, as in "a DeepSpeed checkpoint"; and the
    command that converts it, with {} for the path.

    `also` are families whose commands accept it too. `place` is the checkpoint itself, if that is not the path.
    """

    sure: int
    called: str
    command: str
    also: tuple[str, ...] = ()
    place: Location | None = None


class Probe:
    """The content of a path. Each property is read once, when it is first used.

    `expected` is the family that the caller expects: if several are there, the caller means this one.
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
        """The first bytes of a file, at most HEAD, and its size."""
        with self.place.open_reader() as reader:
            return reader.read_at(0, min(reader.file.size, HEAD)), reader.file.size


class Format(Protocol):
    """A format. For each path, `sniff` is called on one format after another until one is CERTAIN. Then `read` is
    called, once, on the surest; of equally sure ones, on the first.

    `FAMILY` is its name: callers ask for it, and its sources have it as their `family`. A module that
    is asked about every path must import quickly: `read` imports what only it needs.
    """

    FAMILY: str

    def sniff(self, probe: Probe) -> Guess | None:
        """Return how sure the format is that it reads this path, and its name for people; None if it does not read it.

        Raise a CkptconvError if an entry has the name of a checkpoint but is not one.
        """

    def read(self, place: Location, wanted: Wanted) -> Source:
        """Open the checkpoint at `place`: read the descriptions of all that is `wanted`, and no tensor data."""


Found: TypeAlias = tuple[Format, Guess]


def surest(formats: Iterable[Format], probe: Probe, best: Found | None = None) -> Found | None:
    """Return the surest format, the first of equal ones, and its guess; `best` is the best so far. Stop at CERTAIN."""
    for candidate in formats:
        guess = candidate.sniff(probe)
        if guess and (best is None or guess.sure > best[1].sure):
            best = candidate, guess
            if guess.sure == CERTAIN:
                break
    return best
