"""Staging on stores, where an object appears complete when its upload completes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckptconv.errors import CkptconvError
from ckptconv.features.remote import access, stores
from ckptconv.features.remote.uploads import (
    PARTS,
    RenamedUpload,
    Upload,
    UploadBuffers,
    UploadWriter,
    explained,
    part_size,
)
from ckptconv.formats.registered import is_companion_name
from ckptconv.outputs.targets import MANIFEST
from ckptconv.publish.staging.area import DESCRIPTION, RECORD, is_sibling
from ckptconv.publish.staging.base import Staging
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.paths import join
from ckptconv.storage.writing import Writer
from ckptconv.text import format_size


def notes(files: Iterable[tuple[str, int]], memory: int) -> list[str]:
    """Return a note for each file, given as name and size, whose upload parts must be larger than `memory` allows."""
    large = [(name, size, part_size(size, memory)) for name, size in files]
    return [
        f"{name} is uploaded in parts of {format_size(part)}, which exceed the memory limit: a store accepts at most "
        f"{PARTS:,} parts, and the file has {format_size(size)}."
        for name, size, part in large
        if part > part_size(0, memory)
    ]


class UploadStaging(Staging):
    """Files on a store, all uploaded before the first upload is completed.

    `output` is the URL of one file, or if `index` is given of a directory. `is_ours(name)`: the new output replaces an
    earlier file of that name; `index` is removed first and completed last. `memory` (bytes) bounds the buffers.
    """

    def __init__(
        self,
        output: Location,
        plan_id: str,
        memory: int,
        index: str = "",
        is_ours: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(plan_id, durable=True)
        self.path, self.index, self.is_ours = output.path, index, is_ours
        self._output, self._memory = output, memory
        self._uploads: dict[str, UploadWriter] = {}
        self._swept = False
        # At least two buffers, even beyond `memory`: one part is filled while another is sent.
        self._buffers = UploadBuffers(max(memory // part_size(0, memory), 2))

    def _at(self, name: str) -> Location:
        """Return where the file `name` is uploaded."""
        return self._output.join(name) if self.is_ours else self._output

    def create(self, name: str, size: int) -> Writer:
        place = self._at(name)
        with explained(place.path):
            fs, inner = filesystem_at(place)
            part = part_size(size, self._memory)
            if not self._swept:
                stores.of(fs).swept(fs, inner if self.is_ours is None else inner.rpartition("/")[0] + "/")
                self._swept = True
            upload: Upload = (stores.of(fs).upload or RenamedUpload)(fs, inner, size, part)
        writer = UploadWriter(place.path, upload, size, part, self._buffers)
        self._uploads[name] = writer
        self._writers.append(writer)
        return writer

    def seal(self, writer: Writer) -> None:
        writer.sync()
        self._writers.remove(writer)

    def commit(self, names: Sequence[str]) -> None:
        present: Mapping[str, bool] = {}
        if self.is_ours is not None:
            fs, inner = self._directory()
            with explained(self.path):
                present = self._present(fs, inner)
                if self.index in present:
                    self._remove(fs, f"{inner}/{self.index}")
        earlier = [name for name in present if self.is_ours and self.is_ours(name)]
        previous = [name for name in earlier if name not in (*names, self.index)]
        leftovers = [name for name, is_directory in present.items() if is_directory and is_sibling(name, HIDDEN)]

        def remove_last() -> None:
            with explained(join(self.path, previous[-1])):
                self._remove(fs, f"{inner}/{previous[-1]}")
            previous.pop()

        def remove_previous() -> None:
            while previous:
                remove_last()

        # Only the earlier manifest says that these are ours: they go before it does, copied files first.
        previous.sort(key=is_companion_name)
        while previous and is_companion_name(previous[-1]):
            remove_last()
        # The index comes last, when no file remains in its directory that it does not name.
        for number, name in enumerate(sorted(names, key=lambda name: (name == self.index, name == MANIFEST))):
            try:
                if name in (MANIFEST, self.index):
                    remove_previous()
                self._complete(name)
            except CkptconvError as error:
                if (number or earlier) and len(names) > 1:
                    replaced = ", and the earlier output is replaced in part" if earlier else ""
                    error.message += (
                        f" {self.path} is not complete: {number} of {len(names)} files have their final names, but "
                        f"{name} does not{replaced}."
                    )
                raise
        remove_previous()
        self.committed = True
        # These records are of shards that were replaced, or of this output, which is complete.
        for name in leftovers:
            with contextlib.suppress(Exception):
                self._remove_records(fs, f"{inner}/{name}")

    def _present(self, fs: Any, inner: str) -> dict[str, bool]:
        """Return the names in the output directory `inner`, and for each whether it is a directory."""
        return names_in(fs, inner)

    def _directory(self) -> tuple[Any, str]:
        fs, inner = filesystem_at(self._output)
        return fs, inner.rstrip("/")

    def _complete(self, name: str) -> None:
        self._uploads[name].complete()
        del self._uploads[name]

    def _remove_records(self, fs: Any, place: str) -> None:
        """Remove the files that parts have left in the directory `place`.

        The description goes first: without it there is nothing for `finish`.
        """
        assert self.is_ours is not None
        for name in sorted(names_in(fs, place), key=lambda name: name != DESCRIPTION):
            if name == DESCRIPTION or name.startswith(RECORD) or self.is_ours(name) or is_companion_name(name):
                self._remove(fs, f"{place}/{name}")
        if stores.of(fs).upload is None:
            fs.rmdir(place)  # stores have no directories

    @staticmethod
    def _remove(fs: Any, inner: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            access.retrying(lambda: fs.rm_file(inner))

    def discard(self) -> None:
        while self._uploads:
            _, writer = self._uploads.popitem()
            with contextlib.suppress(Exception):
                writer.abort()


def filesystem_at(place: Location) -> tuple[Any, str]:
    """Return the fsspec file system of a place, and the path inside it. Raises UsageError if there is none."""
    return access.filesystem(place.path, place.options)


def directories(place: Location) -> list[str]:
    """Return the names of the directories in `place`, sorted."""
    fs, inner = filesystem_at(place)
    with explained(place.path):
        return sorted(name for name, is_directory in names_in(fs, inner.rstrip("/")).items() if is_directory)


def names_in(fs: Any, inner: str) -> dict[str, bool]:
    """Return the names in a directory of a store, and for each whether it is a directory."""
    try:
        rows = access.names(fs, inner)
    except FileNotFoundError:
        return {}
    return {row["name"].rstrip("/").rpartition("/")[2]: row["type"] == "directory" for row in rows}
