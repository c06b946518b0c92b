"""File systems of fsspec that serve one thread at a time: several threads read through them without harm."""

from __future__ import annotations

import contextlib
import io
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from remote import fresh

from ckptconv.features.remote import access
from ckptconv.features.remote.files import RemoteReader, look

DATA = {name: bytes(range(at, at + 200)) * 50 for at, name in enumerate(("a.bin", "b.bin"))}


class Meeting(io.BytesIO):
    """An open file. A read waits until a second thread reads or seeks, or for a moment."""

    waits = False

    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(data)
        self.path = path
        self._meeting = threading.Barrier(2)

    def _meet(self) -> None:
        if Meeting.waits:
            with contextlib.suppress(threading.BrokenBarrierError):
                self._meeting.wait(0.02)
            self._meeting.reset()

    def read(self, size: int | None = -1) -> bytes:
        self._meet()
        return super().read(size)

    def close(self) -> None:
        """Stay open: the handle is shared."""


class Shared(MemoryFileSystem):  # type: ignore[misc]
    """Files in memory, each with one handle for all who open it, as MemoryFileSystem has. Downloads take a moment."""

    protocol = "shared"
    handles: ClassVar[dict[str, Meeting]] = {}
    downloads: ClassVar[list[str]] = []

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Meeting:
        handle = self.handles[self._strip_protocol(path)]
        handle.seek(0)
        return handle

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path not in self.handles:
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": len(self.handles[path].getvalue()), "created": 1.0}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        rows = [self.info(name) for name in self.handles if name.startswith(self._strip_protocol(path))]
        return rows if detail else [row["name"] for row in rows]

    def exists(self, path: str, **_: Any) -> bool:
        return self._strip_protocol(path) in self.handles

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        data = self.handles[self._strip_protocol(rpath)].getvalue()
        self.downloads.append(rpath)
        time.sleep(0.05)
        Path(lpath).write_bytes(data)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL below which files have a shared handle."""
    fsspec.register_implementation("shared", Shared, clobber=True)
    monkeypatch.setattr(Meeting, "waits", True)
    yield f"shared://{fresh()}"
    Shared.handles.clear()
    Shared.downloads.clear()


def put(url: str, data: bytes) -> None:
    Shared.handles[Shared._strip_protocol(url)] = Meeting(data, url)


def in_archives(place: str) -> Iterator[str]:
    """The files of DATA in archives of each kind. Yields the URL of each archive with a place for the name."""
    for kind in ("w", "w:gz"):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode=kind) as tar:
            for name, data in DATA.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        url = f"{place}/all.tar{'.gz' if kind == 'w:gz' else ''}"
        put(url, packed.getvalue())
        yield f"tar://{{}}::{url}"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in DATA.items():
            archive.writestr(name, data)
    put(f"{place}/all.zip", packed.getvalue())
    yield f"zip://{{}}::{place}/all.zip"


def urls(kind: str, place: str) -> dict[str, str]:
    """The URLs of the files of DATA in a place of a kind."""
    if kind in ("tar", "tar.gz", "zip"):
        of_kind = dict(zip(("tar", "tar.gz", "zip"), in_archives(place), strict=True))[kind]
        return {name: of_kind.format(name) for name in DATA}
    for name, data in DATA.items():
        put(f"{place}/{name}", data)
    return {name: f"{'' if kind == 'handle' else f'{kind}::'}{place}/{name}" for name in DATA}


@pytest.mark.parametrize("kind", ["handle", "tar", "tar.gz", "zip", "simplecache", "filecache"])
def test_several_threads_read_what_is_at_their_places(kind: str, place: str, tmp_path: Path) -> None:
    options = {kind: {"cache_storage": str(tmp_path)}} if kind.endswith("cache") else {}
    with contextlib.ExitStack() as stack:
        readers = {}
        for name, url in urls(kind, place).items():
            # Two of one file, as of one that is read in advance and on demand.
            readers[name] = [stack.enter_context(RemoteReader(look(url, options).file, options)) for _ in range(2)]
        places = [(name, at, 1000 * at + 7) for at in range(4) for name in DATA]

        def read(name: str, at: int, start: int) -> bytes:
            return readers[name][at % 2].read_at(start, 900)

        with ThreadPoolExecutor(4) as pool:
            came = list(pool.map(lambda place: read(*place), places))
    assert came == [DATA[name][start : start + 900] for name, _, start in places]
    # Two at a time would write one file of the cache, with holes until both end.
    assert len(Shared.downloads) == (len(DATA) if kind.endswith("cache") else 0)


def test_a_cache_of_a_parallel_store_is_asked_by_one_thread_at_a_time() -> None:
    of_http = "simplecache::http://127.0.0.1:9/x.pt"
    for url, parallel in (("http://127.0.0.1:9/x.pt", True), (of_http, False), ("memory://x.pt", False)):
        assert access.is_parallel(access.filesystem(url)[0]) is parallel
