"""Outputs on stores that several processes make: shards under their final names, and no index until all are there.

On a store, no process can complete an upload that another has sent. So a part removes the index of an earlier
output and puts its shards under their final names: a directory without an index is no model. In a directory of the plan
next to them, it leaves a record of every shard, and the small files that would declare the shards to be a model.
`finish` checks every record against its object, and puts the small files under their final names, the index last.

A tree of files is written in this way by a single process too: the file next to it, which names it, makes it complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptconv.errors import CorruptError
from ckptconv.features.remote import access, stores
from ckptconv.features.remote.files import RemoteReader
from ckptconv.features.remote.staging import UploadStaging, filesystem_at, names_in
from ckptconv.features.remote.uploads import explained
from ckptconv.outputs.schema import object_record
from ckptconv.outputs.targets import MANIFEST
from ckptconv.plan import FilePlan
from ckptconv.publish.manifest import record
from ckptconv.publish.staging.area import DESCRIPTION, MOST_RECORD, is_sibling, record_of
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.reading import Reader
from ckptconv.storage.writing import Writer
from ckptconv.tensors.moves import File

if TYPE_CHECKING:
    from ckptconv.storage.digests import Digests


class PartsOnStore(UploadStaging):
    """A directory on a store of which this process makes some shards, or which it finishes. Can be pickled.

    `output` is its URL. `shared`: other processes make parts of it at the same time. `shards` is how the names of those
    files end that are not small.
    """

    is_ours: Callable[[str], bool]

    def __init__(
        self,
        output: Location,
        plan_id: str,
        memory: int,
        index: str,
        is_ours: Callable[[str], bool],
        shared: bool = False,
        shards: tuple[str, ...] = (),
    ) -> None:
        super().__init__(output, plan_id, memory, index, is_ours)
        self._arguments = output, plan_id, memory, index, is_ours, shared, shards
        self._shards = shards
        self.shared = shared
        self._place = output.join(HIDDEN + plan_id)
        self._names: dict[Writer, str] = {}
        # Files that this run makes, or has other processes make.
        self._mine: set[str] = set()
        # No sweep of stale uploads: unfinished uploads to the same directory may be those of other parts.
        self._swept = True
        # Whether the index of an earlier output was looked for and removed.
        self._opened = False

    def __reduce__(self) -> tuple[Any, ...]:
        return PartsOnStore, self._arguments

    def elsewhere(self) -> PartsOnStore:
        return PartsOnStore(*self._arguments)

    def _is_shard(self, name: str) -> bool:
        """Return whether a file of an output is a shard, rather than a small file that declares the shards to be a
        model."""
        return name.endswith(self._shards)

    def _at(self, name: str) -> Location:
        # The files that declare the shards to be a model wait until all shards are there.
        return self._final(name) if self._is_shard(name) else self._place.join(name)

    def _final(self, name: str) -> Location:
        """Return the final place of a file."""
        return self._output.join(name)

    def expect(self, files: Iterable[FilePlan]) -> None:
        self._mine.update(file.name for file in files)

    def describe(self, data: bytes) -> None:
        self._put(DESCRIPTION, data)

    def create(self, name: str, size: int) -> Writer:
        writer = super().create(name, size)
        self._names[writer] = name
        return writer

    def seal(self, writer: Writer) -> None:
        super().seal(writer)
        if not self._opened:
            self._open()
            self._opened = True
        name = self._names.pop(writer)
        if self._is_shard(name):
            with explained(self._place.path):
                self._forget(name)
        super()._complete(name)

    def _open(self) -> None:
        """Remove the index of an earlier output, which declares it to be complete, before the first of its shards goes.
        Its manifest stays: other parts recognize our files by it."""
        fs, inner = self._directory()
        with explained(self.path):
            if self.index in names_in(fs, inner):
                self._remove(fs, f"{inner}/{self.index}")

    def record(self, file: FilePlan, crcs: Mapping[str, int] | None, digests: Digests | None = None) -> None:
        facts = {"plan": self.plan_id, "version": self._at(file.name).entry.file.stamp}
        self._put(record_of(file.name), record(file, crcs, digests, facts))
        self.recorded.add(file.name)

    def _complete(self, name: str) -> None:
        """Put a small file under its final name; shards already have theirs."""
        if self._is_shard(name):
            return
        data = content_of(self._at(name), MOST_RECORD)
        final = self._final(name)
        fs, inner = filesystem_at(final)
        with explained(final.path):
            if data is None:
                raise FileNotFoundError(self._at(name).path)
            access.retrying(lambda: fs.pipe_file(inner, data))

    def keep(self) -> str:
        super().discard()
        if not self.recorded:
            return ""
        return (
            f"{self._kept_files()} kept in {self.path}, with records in {self._place}: the same command continues "
            "from there."
        )

    def discard(self) -> None:
        super().discard()
        for name in self._mine & self.recorded:
            with contextlib.suppress(Exception):
                record = self._record(name)
                if record is not None:
                    self._forget(name)
                    if self._is_as_recorded(name, record):
                        fs, inner = filesystem_at(self._at(name))
                        self._remove(fs, inner)
        if not self.shared:
            with contextlib.suppress(Exception):
                fs, inner = filesystem_at(self._place)
                self._remove_records(fs, inner)

    # ---- records

    def _known(self, name: str, size: int) -> dict[str, Any] | None:
        """Return the record of a file if its object is the one that the record was written for."""
        with explained(self._place.path):
            entry = self._record(name)
            return entry if entry and entry["size"] == size and self._is_as_recorded(name, entry) else None

    def _is_as_recorded(self, name: str, entry: Mapping[str, Any]) -> bool:
        now = self._at(name).entry
        return (now.kind, now.file.size, now.file.stamp) == ("file", entry["size"], entry["version"])

    def _record(self, name: str) -> dict[str, Any] | None:
        place = self._place.join(record_of(name))
        data = content_of(place, MOST_RECORD)
        if data is None:
            return None
        try:
            record = object_record(data)
            if (record["name"], record["plan"]) != (name, self.plan_id):
                raise ValueError("it belongs to another file or plan")
        except ValueError as error:
            if not self.finishing:
                return None
            raise CorruptError(
                f"{place}, the record of {name!r}, is damaged: {error}. The index was not written.",
                "Run the part with this file again, then finish.",
            ) from None
        return record

    @contextlib.contextmanager
    def _reading(self, name: str, entry: Mapping[str, Any]) -> Iterator[Reader]:
        place = self._at(name)
        yield RemoteReader(File(place.path, entry["size"], entry["version"]), place.options)

    def _forget(self, name: str) -> None:
        fs, inner = filesystem_at(self._place.join(record_of(name)))
        self._remove(fs, inner)

    def _put(self, name: str, data: bytes) -> None:
        fs, inner = filesystem_at(self._place.join(name))
        with explained(self._place.path):
            if stores.of(fs).upload is None:
                fs.makedirs(inner.rpartition("/")[0], exist_ok=True)  # stores have no directories
            access.retrying(lambda: fs.pipe_file(inner, data))


class TreeOnStore(PartsOnStore):
    """A tree of files on a store, and a file next to it that names it, which is written last. Can be pickled.

    `after` is the name of that file.
    """

    def __init__(self, output: Location, plan_id: str, memory: int, after: str, shared: bool = False) -> None:
        super().__init__(output, plan_id, memory, after, _is_any, shared)
        self._given = output, plan_id, memory, after, shared

    def __reduce__(self) -> tuple[Any, ...]:
        return TreeOnStore, self._given

    def elsewhere(self) -> TreeOnStore:
        return TreeOnStore(*self._given)

    def _is_shard(self, name: str) -> bool:
        return name not in (self.index, MANIFEST)

    def _final(self, name: str) -> Location:
        return self._output.parent.join(name) if name == self.index else self._output.join(*name.split("/"))

    def _open(self) -> None:
        pointer = self._final(self.index)
        pointed = content_of(pointer, MOST_RECORD)
        named = None if pointed is None else pointed.decode(errors="replace").strip()
        if named == self._output.name:
            fs, inner = filesystem_at(pointer)
            with explained(pointer.path):
                self._remove(fs, inner)

    def _present(self, fs: Any, inner: str) -> dict[str, bool]:
        present: dict[str, bool] = {}
        below = [""]
        while below:
            above = below.pop()
            for name, is_directory in names_in(fs, f"{inner}/{above}".rstrip("/")).items():
                if is_directory and not is_sibling(name, HIDDEN):
                    below.append(f"{above}{name}/")
                else:
                    present[above + name] = is_directory
        return present


def _is_any(name: str) -> bool:
    """Return whether a file of this name is part of a tree: every file but the records of its parts."""
    return not is_sibling(name, HIDDEN)


def content_of(place: Location, most: int) -> bytes | None:
    """Return the content of `place`; None if it is missing. Raises CorruptError if it is larger than `most` bytes."""
    fs, inner = filesystem_at(place)
    with explained(place.path), contextlib.suppress(FileNotFoundError):
        data: bytes = access.retrying(lambda: fs.cat_file(inner, start=0, end=most + 1))
        if len(data) > most:
            raise CorruptError(f"{place} has more than {most} bytes, which exceeds the size of any record.")
        return data
    return None
