"""Where a file or directory is, and the options of the store that it is in: one value instead of two."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ckptconv.storage import files, paths
from ckptconv.tensors.moves import File


@dataclass(frozen=True)
class Location:
    """A path or URL, and the options of its store. What stands there is looked at once, when it is asked for.

    `file` is what was found there when a listing or an entry told of it: a reader sees whether it is still the same.

    >>> str(Location("/runs/7").join("latest"))
    '/runs/7/latest'
    """

    path: str
    options: files.Options = field(default_factory=dict, repr=False, hash=False)
    file: File | None = None

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return paths.basename(self.path)

    @property
    def parent(self) -> Location:
        """The directory that this is in."""
        return self.at(paths.dirname(self.path))

    def join(self, *names: str) -> Location:
        """`names` inside of this directory."""
        return self.at(paths.join(self.path, *names))

    def at(self, other: str | File) -> Location:
        """Another path of the same store, or a file in it that was looked at."""
        if isinstance(other, str):
            return replace(self, path=other, file=None)
        return replace(self, path=other.path, file=other)

    @functools.cached_property
    def entry(self) -> files.Entry:
        """What stands here. Raises FailedError where that cannot be told."""
        return files.look(self.path, self.options)

    @property
    def kind(self) -> str:
        """ "file", "directory", "other" (a pipe, a device), or "missing"."""
        return self.entry.kind

    @functools.cached_property
    def names(self) -> Mapping[str, files.Entry]:
        """The names in this directory, sorted, with what each is."""
        return files.listing(self.path, self.options)

    def open_reader(self) -> files.Reader:
        """A reader of the descriptions in this file."""
        return files.open_reader(self.file or self.path, self.options)

    def open_buffered(self) -> files.BufferedReader:
        """A reader of this file that fetches what is around a description along with it."""
        return files.open_reader(self.file or self.path, self.options, around=True)

    def read_text(self, limit: int) -> str:
        """This small text file, at most `limit` bytes. Raises CorruptError where it is larger or is not UTF-8."""
        return files.read_text(self.path, limit, self.options)
