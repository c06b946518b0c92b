"""Outputs on S3 that several processes make: uploads that wait, and records of what completes them.

An upload belongs to no process: whoever knows its number and the tags of its parts may complete it, and until then
nobody sees it. Those who make a part leave for each file a record, an object in a directory of the plan beside the
output; who finishes it reads the records, looks whether the uploads are still there, and completes them as one process
does, the index last. What was completed tells its plan: a finish that was killed goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckptconv.errors import CorruptError
from ckptconv.outputs.schema import MOST_DESCRIPTION, MOST_RECORD, upload_record
from ckptconv.plan import FilePlan
from ckptconv.publish.manifest import Made, made, record
from ckptconv.publish.staging.area import DESCRIPTION, PARTS, PREFIX, RECORD, Described, hidden, is_sibling
from ckptconv.publish.staging.base import Staging
from ckptconv.publish.staging.remote import UploadStaging
from ckptconv.storage import remote
from ckptconv.storage.paths import basename, dirname, join
from ckptconv.storage.uploads import Options, S3Upload, Upload, UploadWriter, explained
from ckptconv.storage.writing import Writer


def can_wait(url: str, options: Options | None = None) -> bool:
    """Whether uploads to `url` may be completed by another process than the one that sends them."""
    fs, _ = remote.filesystem(url, options)
    return "s3" in remote.protocols(fs)


def described(path: str, options: Options | None = None) -> list[Described]:
    """Directories of plans for the output `path`, as `staging.described` gives those on a disk."""
    found = []
    for directory, prefix, kind in ((path, PREFIX, "directory"), (dirname(path), hidden(basename(path)), "file")):
        for name, is_directory in _names(directory, options):
            if not is_directory or not is_sibling(name, prefix) or name.endswith(PARTS) != (kind == "file"):
                continue
            place = join(directory, name)
            data = _get(join(place, DESCRIPTION), MOST_DESCRIPTION, options)
            if data is not None:
                found.append(Described(place, name[len(prefix) :].removesuffix(PARTS), kind, data, published=False))
    return found


def directories(path: str, options: Options | None = None) -> list[str]:
    """The names of the directories in `path`."""
    return sorted(name for name, is_directory in _names(path, options) if is_directory)


class PendingUploads(UploadStaging):
    """An output some of whose files this process sends, or all of which it completes. Can be pickled.

    `path` is one file's URL, or with `index` a directory's. `shared`: others make parts of it at the same time.
    """

    def __init__(
        self,
        path: str,
        plan_id: str,
        memory: int,
        options: Options,
        index: str = "",
        is_ours: Callable[[str], bool] | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(path, plan_id, memory, options, index, is_ours)
        self._arguments = path, plan_id, memory, options, index, is_ours, shared
        self.shared = shared
        name = PREFIX + plan_id if is_ours else hidden(basename(path)) + plan_id + PARTS
        self._place = join(path if is_ours else dirname(path), name)
        # As `StagedDirectory.finishing`.
        self.finishing = False
        self._noted: dict[str, tuple[FilePlan, Mapping[str, int] | None]] = {}
        self._names: dict[Writer, str] = {}
        # Uploads that are sent, by whomever, and the files among them that are this run's.
        self._sent: dict[str, S3Upload] = {}
        self._begun: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return PendingUploads, self._arguments

    def elsewhere(self) -> Staging:
        return PendingUploads(*self._arguments)

    def finished(self, name: str, size: int) -> Made | None:
        found = self._load(name)
        return made(found) if found and found["size"] == size else None

    def take_note(self, name: str) -> None:
        self._begun.add(name)
        self._load(name)

    def describe(self, data: bytes) -> None:
        self._put(DESCRIPTION, data)

    def create(self, name: str, size: int) -> Writer:
        with explained(self._url(name)):
            self._forget(name)
        writer = super().create(name, size)
        self._names[writer] = name
        self._begun.add(name)
        return writer

    def _begin(self, fs: Any, inner: str, size: int, part: int) -> Upload:
        # What is old may be another part's: leftovers are for the bucket's rules.
        return S3Upload(fs, inner, size, self.plan_id)

    def note(self, file: FilePlan, crcs: Mapping[str, int] | None) -> None:
        self._noted[file.name] = file, crcs

    def seal(self, writer: Writer) -> None:
        super().seal(writer)
        assert isinstance(writer, UploadWriter)
        name = self._names.pop(writer)
        upload = writer.upload
        assert isinstance(upload, S3Upload)
        facts = {"plan": self.plan_id, **upload.state}
        if name in self._noted:
            self._put(_record_of(name), record(*self._noted[name], facts))
        else:
            self._put(_record_of(name), json.dumps({"name": name, "size": upload.size, "spans": [], **facts}).encode())
        self._sent[name] = upload
        del self._uploads[name]

    def commit(self, names: Sequence[str]) -> None:
        super().commit(names)
        # The output is there. The description goes first: without it there is nothing to finish.
        with contextlib.suppress(Exception):
            listed = (name for name, _ in _names(self._place, self._options))
            for name in (DESCRIPTION, *(name for name in listed if name.startswith(RECORD))):
                self._drop(name)

    def _is_published(self, name: str) -> bool:
        return name in self._sent and self._sent[name].is_complete()

    def _complete(self, name: str) -> None:
        with explained(self._url(name)):
            self._sent.pop(name).complete()

    def keep(self) -> str:
        super().discard()
        files = [name for name in self._begun if name in self._sent]
        if not files:
            return ""
        sent = "1 finished file waits" if len(files) == 1 else f"{len(files)} finished files wait"
        return f"{sent} to be completed, as told in {self._place}: the same command goes on from there."

    def discard(self) -> None:
        super().discard()
        for name in self._begun:
            with contextlib.suppress(Exception):
                self._forget(name)
        with contextlib.suppress(Exception):
            if not self.shared:
                self._drop(DESCRIPTION)

    # ---- records

    def _load(self, name: str) -> dict[str, Any] | None:
        """The record of a file whose upload waits, or was completed."""
        with explained(self._place):
            found = self._record(name)
            if found is None:
                return None
            upload = self._upload(name, found)
            if not upload.waits() and not upload.is_complete():
                return None
        self._sent[name] = upload
        return found

    def _record(self, name: str) -> dict[str, Any] | None:
        url = join(self._place, _record_of(name))
        data = _get(url, MOST_RECORD, self._options)
        if data is None:
            return None
        try:
            found = upload_record(data)
            if (found["name"], found["plan"]) != (name, self.plan_id):
                raise ValueError("it is of another file, or of another plan")
        except ValueError as error:
            if not self.finishing:
                return None
            raise CorruptError(
                f"{url}, the record of {name!r}, is damaged: {error}. Nothing was put under its name.",
                "Run its part again, then finish.",
            ) from None
        return found

    def _upload(self, name: str, found: Mapping[str, Any]) -> S3Upload:
        fs, inner = remote.filesystem(self._url(name), self._options)
        return S3Upload(fs, inner, found["size"], self.plan_id, found)

    def _forget(self, name: str) -> None:
        """Take back what was sent of a file before."""
        found = self._record(name)
        if found is not None:
            self._drop(_record_of(name))
            with contextlib.suppress(FileNotFoundError):
                self._upload(name, found).abort()

    def _put(self, name: str, data: bytes) -> None:
        url = join(self._place, name)
        fs, inner = remote.filesystem(url, self._options)
        with explained(url):
            remote.retrying(lambda: fs.pipe_file(inner, data))

    def _drop(self, name: str) -> None:
        fs, inner = remote.filesystem(join(self._place, name), self._options)
        with contextlib.suppress(FileNotFoundError):
            remote.retrying(lambda: fs.rm_file(inner))


def _record_of(name: str) -> str:
    return RECORD + hashlib.sha256(name.encode()).hexdigest()[:16]


def _names(url: str, options: Options | None) -> Iterator[tuple[str, bool]]:
    """The names in a directory, and whether each is one."""
    fs, inner = remote.filesystem(url, options)
    with explained(url), contextlib.suppress(FileNotFoundError):
        for row in remote.names(fs, inner):
            yield row["name"].rstrip("/").rpartition("/")[2], row["type"] == "directory"


def _get(url: str, most: int, options: Options | None) -> bytes | None:
    """What is under `url`, of which no more than `most` bytes are read."""
    fs, inner = remote.filesystem(url, options)
    with explained(url), contextlib.suppress(FileNotFoundError):
        data: bytes = remote.retrying(lambda: fs.cat_file(inner, start=0, end=most + 1))
        if len(data) > most:
            raise CorruptError(f"{url} has more than {most} bytes, where none has as many.")
        return data
    return None
