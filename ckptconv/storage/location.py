"""A path or URL together with the options of its store, as one value."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ckptconv.errors import UsageError
from ckptconv.storage import files, paths
from ckptconv.storage.reading import Entry, Options, Reader
from ckptconv.tensors.moves import File


class Location:
    """A path or URL, and the options of its store. What is there is determined once, on demand.

    `file` is the file that a listing or an entry found there: a reader checks that it is still the same.

    >>> str(Location("/runs/7").join("latest"))
    '/runs/7/latest'
    """

    def __init__(self, path: str, options: Options | None = None, file: File | None = None) -> None:
        self.path, self.options, self.file = path, {} if options is None else options, file

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Location):
            return NotImplemented
        return (self.path, self.options, self.file) == (other.path, other.options, other.file)

    def __hash__(self) -> int:
        return hash((self.path, self.file))

    def __repr__(self) -> str:
        return f"Location({self.path!r})"

    def __str__(self) -> str:
        return self.path

    @functools.cached_property
    def name(self) -> str:
        """The last component of the path."""
        return paths.basename(self.path)

    @property
    def parent(self) -> Location:
        """The directory that contains this."""
        return self.at(paths.dirname(self.path))

    def join(self, *names: str) -> Location:
        """Return the location of `names` in this directory, known if a store other than HTTP has listed it."""
        inner = self.at(paths.join(self.path, *names))
        lists_all = paths.is_remote(self.path) and not paths.is_quoted(self.path)
        if lists_all and vars(self).get("names") and len(names) == 1 and "/" not in names[0]:
            inner.entry = self.names.get(names[0], Entry("missing", File(inner.path, 0)))
            inner.file = inner.entry.file if inner.entry.kind == "file" else None
        return inner

    def has_file(self, path: str) -> bool:
        """Return whether this directory, which is listed once, has a file at the relative `path`."""
        if "/" in path:
            return self.join(path).kind == "file"
        return path in self.names and self.names[path].kind == "file"

    def child(self, name: str) -> Location:
        """Return the location of a directory in this one: the same each time, so that it is listed once."""
        return self._children.setdefault(name, self.join(name))

    @functools.cached_property
    def _children(self) -> dict[str, Location]:
        return {}

    def at(self, entry: str | File) -> Location:
        """Return the location of another path of the same store, or of a file found in it."""
        if isinstance(entry, str):
            return Location(entry, self.options)
        return Location(entry.path, self.options, entry)

    @functools.cached_property
    def entry(self) -> Entry:
        """The entry at this location. Raises FailedError if it cannot be determined."""
        return files.look(self.path, self.options)

    @property
    def kind(self) -> str:
        """ "file", "directory", "other" (a pipe, a device), or "missing"."""
        return self.entry.kind

    def check_file(self, called: str) -> None:
        """Raise UsageError if no file is here; `called` is the user's name for it."""
        if self.kind != "file":
            what = "does not exist" if self.kind == "missing" else f"is {self.entry.described}, and not a file"
            raise UsageError(f"{called} {what}.")

    @functools.cached_property
    def names(self) -> Mapping[str, Entry]:
        """The entries of this directory by name, sorted."""
        return files.listing(self.path, self.options)

    def open_reader(self) -> Reader:
        """Return a reader of the descriptions in this file."""
        return files.open_reader(self.file or self.path, self.options)

    def read_text(self, limit: int) -> str:
        """Return the text of this small file. Raises CorruptError if it is larger than `limit` bytes or not UTF-8."""
        return files.read_text(self.path, limit, self.options)
