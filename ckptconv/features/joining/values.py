"""Values by key: in the files of a directory, or in ranges of files that a description names.

`Files` opens descriptions as a whole, and ranges of the files that they describe.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ckptconv.errors import CorruptError, LimitError
from ckptconv.plan import Input
from ckptconv.storage.ahead import ahead
from ckptconv.storage.files import open_reader
from ckptconv.storage.location import Location
from ckptconv.tensors.moves import File
from ckptconv.text import quoted

# The most directories of an array.
_MOST_DIRECTORIES = 1 << 14


class Value(NamedTuple):
    """The bytes of a key in a store: `length` bytes from byte `offset` of `file`. `data` are these bytes, if a
    description holds them; None if it only has their place."""

    file: File
    offset: int
    length: int
    data: bytes | None = None

    def part(self, offset: int, length: int) -> Value:
        """Return a part of this value."""
        data = None if self.data is None else self.data[offset : offset + length]
        return Value(self.file, self.offset + offset, length, data)


class Files:
    """Opens the files in the directory `place`, and records their identities, and the number of bytes read."""

    def __init__(self, place: Location) -> None:
        self.place = place
        self.inputs: dict[str, Hashable] = {}
        self.bytes_read = 0

    def directory(self, path: str) -> Location | None:
        """Return the directory at a relative path, "" for the place itself; None if there is none."""
        place = self.place
        for part in path.split("/") if path else ():
            if part not in place.names or place.names[part].kind != "directory":
                return None
            place = place.child(part)
        return place

    def find(self, path: str) -> File | None:
        """Return the file at a relative path; None if there is none. Each directory is listed once."""
        directory, _, name = path.rpartition("/")
        listed = self.directory(directory)
        entry = listed.names.get(name) if listed else None
        return entry.file if entry and entry.kind == "file" else None

    def add(self, file: File, content: Hashable = None) -> None:
        """Record a file that is identified by its size and its `content`, by default its stamp."""
        name = file.path.removeprefix(self.place.path).lstrip("/")
        self.inputs[name] = Input(file, (file.size, file.stamp if content is None else content))

    def whole(self, path: str, most: int) -> bytes | None:
        """Return the content of a small file; None if there is none."""
        file = self.find(path)
        if file is None:
            return None
        if file.size > most:
            raise CorruptError(f"{file.path} has {file.size} bytes; at most {most} are supported.")
        with self.place.at(file).open_reader() as reader:
            data = reader.read_at(0, file.size)
        self.bytes_read += file.size
        self.add(file, zlib.crc32(data))
        return data

    def contents(self, values: Sequence[Value]) -> list[bytes]:
        """Return the bytes of short values. Each file is read from its beginning to its end."""
        by_file: dict[File, list[Value]] = {}
        for value in sorted({value for value in values if value.data is None}, key=lambda value: value.offset):
            by_file.setdefault(value.file, []).append(value)

        def read(file: Location) -> tuple[dict[Value, bytes], int]:
            assert file.file is not None
            with open_reader(file.file, file.options, around=True) as reader:
                data_of = {value: reader.read_at(value.offset, value.length) for value in by_file[file.file]}
                return data_of, reader.bytes_read

        read_values: dict[Value, bytes] = {}
        for file, (data_of, size) in zip(by_file, ahead(read, [self.place.at(file) for file in by_file]), strict=True):
            read_values |= data_of
            self.bytes_read += size
            self.add(file)
        return [read_values[value] if value.data is None else value.data for value in values]


class Store(Protocol):
    """Values by their keys, such as those of a database."""

    def under(self, name: str) -> Mapping[str, Value]:
        """Return the values of an array by their keys, without its name and a slash."""

    def listed(self) -> Iterable[str]:
        """Return the keys that are known without a search."""


class Directories:
    """The files of a directory, by their paths. Each array is a directory in it."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def under(self, name: str) -> Mapping[str, Value]:
        values: dict[str, Value] = {}
        places = [("", self._files.directory(name))]
        for prefix, place in places:
            for child, entry in place.names.items() if place else ():
                if entry.kind == "file" and entry.file:
                    values[prefix + child] = Value(entry.file, 0, entry.file.size)
                elif entry.kind == "directory" and place:
                    places.append((f"{prefix}{child}/", place.child(child)))
            if len(places) > _MOST_DIRECTORIES:
                raise LimitError(f"{self._files.place}: the array {quoted(name)} has too many directories.")
        return values

    def listed(self) -> Iterable[str]:
        return ()
