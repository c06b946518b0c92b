"""Files on stores: entries at URLs, listings, and reads of ranges, with a request each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptconv.errors import CkptconvError, FailedError
from ckptconv.features.remote import access
from ckptconv.features.remote.stores import Put
from ckptconv.storage.paths import is_quoted, join
from ckptconv.storage.reading import Entry, Options, Reader, changed, ends_early
from ckptconv.tensors.moves import File


def look(path: str, options: Options | None) -> Entry:
    fs, inner = access.filesystem(path, options)
    try:
        row = access.info(fs, inner)
    except CkptconvError:
        raise
    except Exception as error:
        raise FailedError(f"{path} cannot be accessed: {access.why(error)}.", access.hint(error)) from error
    return Entry("missing", File(path, 0)) if row is None else _entry(path, row)


def _entry(path: str, row: Mapping[str, Any]) -> Entry:
    """Convert the info that a file system gives of a path to an entry."""
    if row["type"] == "directory":
        return Entry("directory", File(path, 0))
    return Entry("file", File(path, row.get("size") or 0, access.stamp(row)), access.time_of(row))


def listing(directory: str, options: Options | None) -> dict[str, Entry]:
    fs, inner = access.filesystem(directory, options)
    try:
        rows = access.names(fs, inner)
    except FileNotFoundError:
        return {}  # stores without directories know only those that contain something
    except CkptconvError:
        raise
    except Exception as error:
        raise FailedError(f"{directory} cannot be listed: {access.why(error)}.", access.hint(error)) from error
    from pathlib import PurePosixPath
    from urllib.parse import unquote

    entries = {}
    for row in rows:
        name = PurePosixPath(row["name"].rstrip("/")).name
        if is_quoted(directory):
            name = unquote(name)
            if "/" in name or name in (".", ".."):
                continue  # not the name of an entry here
        # Some stores list a directory as an empty file in itself.
        if name and row["name"].rstrip("/") != inner.rstrip("/"):
            path = join(directory, name)
            known = row["type"] == "directory" or (row.get("size") is not None and access.stamp(row))
            entries[name] = _entry(path, row) if known else look(path, options)
    return dict(sorted(entries.items()))


class RemoteReader(Reader):
    """Reads ranges of a URL, with one request each, which is retried if it failed and may still succeed."""

    def __init__(self, file: File, options: Options | None) -> None:
        self.file = file
        self._options = options
        self._fs, inner = access.filesystem(file.path, options)
        self._fetch = access.ranges(self._fs, inner, file.size, file.stamp)

    @property
    def parallel(self) -> bool:
        """Whether the file system supports several requests at a time."""
        return access.is_parallel(self._fs)

    def fetch(self, offset: int, length: int, put: Put, stop: threading.Event | None = None) -> None:
        """Read a range with one request. Call `put` with each piece and its distance from `offset`.

        A retry puts the whole range again. There is no retry once `stop` is set.
        """
        if not length:
            return
        if offset + length > self.file.size:
            raise ends_early(self.file.path, self.file.size, offset + length - self.file.size)

        def attempt() -> None:
            end = 0

            def counted(at: int, data: bytes) -> None:
                nonlocal end
                end = at + len(data)
                if end <= length:
                    put(at, data)

            self._fetch(offset, offset + length, counted)
            if end != length:
                raise access.ShortReadError(f"{end} bytes arrived, but {length} were requested")

        with self._explained():
            access.retrying(attempt, stop)

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if len(buffers) == 1:
            self._read_into(buffers[0], offset)
            return
        data = memoryview(bytearray(sum(map(len, buffers))))
        self._read_into(data, offset)
        for buffer in buffers:
            buffer[:] = data[: len(buffer)]
            data = data[len(buffer) :]

    def _read_into(self, out: memoryview, offset: int) -> None:
        def put(at: int, data: bytes) -> None:
            out[at : at + len(data)] = data

        self.fetch(offset, len(out), put)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        path = self.file.path
        try:
            yield
        except CkptconvError:
            raise
        except (access.ChangedError, FileNotFoundError) as error:
            raise changed(self.file, look(path, self._options)) from error
        except access.NoRangesError as error:
            raise FailedError(
                f"{path} cannot be read in parts: {access.why(error)}.",
                "Download its directory. From servers without range requests, such as python -m http.server, "
                "ckptconv reads only a single file by its own URL, without the configuration next to it.",
            ) from error
        except (access.ShortReadError, access.WrongAnswerError) as error:
            now = look(path, self._options)
            if (now.file.size, now.file.stamp) != (self.file.size, self.file.stamp):
                raise changed(self.file, now) from error
            raise FailedError(f"{path} cannot be read, after several attempts: {error}.") from error
        except Exception as error:
            raise FailedError(f"{path} cannot be read: {access.why(error)}.", access.hint(error)) from error
