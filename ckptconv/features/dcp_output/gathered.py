"""A directory whose files are elsewhere: a checkpoint that is verified before its files have their final names."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ckptconv.storage.location import Location
from ckptconv.storage.reading import Entry, Options
from ckptconv.tensors.moves import File


class Gathered(Location):
    """A directory to be: `places` maps the names of its files to where each is now."""

    def __init__(self, path: str, options: Options, places: Mapping[str, str]) -> None:
        super().__init__(path, options)
        self.places = places

    def at(self, entry: str | File) -> Location:
        return Location(self.path, self.options).at(entry)

    def join(self, *names: str) -> Location:
        place = self.places.get("/".join(names))
        return super().join(*names) if place is None else self.at(place)

    @functools.cached_property
    def names(self) -> Mapping[str, Entry]:
        return {name: self.at(place).entry for name, place in sorted(self.places.items())}
