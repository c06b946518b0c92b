"""A step of a run: its files, and the facts that their names and sizes show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ckptconv.features.joining.sets import OPTIMIZER, FileSet
from ckptconv.features.runs.names import is_beside_weights, is_unfinished, number_of, series_of, stem
from ckptconv.features.runs.places import known
from ckptconv.formats.registered import DESCRIBING
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.reading import Entry

# Suffixes of files that describe others, of which a step consists.
DESCRIBED = tuple(DESCRIBING)


class Step(NamedTuple):
    """A step of a run: its name there, the number in it, if any, and its files by their paths in `home`, the directory
    of the run.

    `place` is what is opened: its directory, a virtual checkpoint in it, or of files the one with the weights. `links`
    are the symbolic links among its names. `unlisted` says why a directory of it could not be listed, if one could not.
    """

    name: str
    number: int | None
    home: Location
    place: Location
    files: Mapping[str, Entry]
    links: tuple[str, ...] = ()
    unlisted: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Its names in the directory of the run: that of its directory, or of its files."""
        return tuple(dict.fromkeys(path.partition("/")[0] for path in self.files)) or (self.name,)

    @property
    def bytes(self) -> int:
        return sum(entry.file.size for entry in self.files.values())

    @property
    def time(self) -> float | None:
        """When the last of its files changed, in seconds since 1970; None if the store does not say."""
        return max((entry.time for entry in self.files.values() if entry.time is not None), default=None)

    @property
    def shapes(self) -> dict[str, int]:
        """The sizes of its files by their paths in it, with # in the place of its own number where that is one of a
        step, and not of a rank."""
        start = 0 if self.is_files else len(self.name) + 1
        sizes = {path[start:]: entry.file.size for path, entry in self.files.items()}
        if self.number is None:
            return sizes
        own = re.compile(rf"(?<!\d)0*{self.number}(?!\d)")
        return {(_without(path, own, self.number) if own.search(path) else path): sizes[path] for path in sizes}

    @property
    def path(self) -> str:
        """The path or URL of the step."""
        return self.home.join(self.name).path

    def at(self, path: str) -> Location:
        """Return the location of one of its files, with its known entry."""
        return known(self.home.at(self.files[path].file), self.files[path])

    @property
    def is_files(self) -> bool:
        """Whether the step is files, without a directory of its own."""
        return self.name in self.files

    @property
    def is_named_unfinished(self) -> bool:
        """Whether the step has a name that trainers give a step until it is complete."""
        return any(map(is_unfinished, self.names))

    @property
    def series(self) -> tuple[str, ...]:
        """The series of which its names are, without files beside the weights: several, if it has several models; none,
        if only its optimizer is left."""
        names = [name for name in self.names if not (self.is_files and is_beside_weights(name))]
        if not names and not self.optimizers:
            names = [*self.names]
        return tuple(sorted({series_of(name) for name in names}))

    @property
    def optimizers(self) -> int:
        """Number of the step's files that are those of optimizers, if the step is files."""
        return sum(self.is_files and FileSet(stem(name), None).kind == OPTIMIZER for name in self.names)

    @property
    def is_made_here(self) -> bool:
        """Whether this program wrote the step from another one, and may have left out parts."""
        return any(path.endswith(DESCRIBED) or f"/{HIDDEN}" in path for path in self.files)


def _without(path: str, own: re.Pattern[str], number: int) -> str:
    """Return a path with # in the place of the number of its step."""
    return "/".join(own.sub("#", name) if number_of(name) == number else name for name in path.split("/"))
