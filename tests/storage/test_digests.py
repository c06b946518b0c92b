"""Digests of a file that is written in any order, by several threads."""

from __future__ import annotations

import hashlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.errors import FailedError
from ckptconv.storage import digests
from ckptconv.storage.digests import DigestingWriter, digests_of
from ckptconv.storage.writing import LocalWriter, Writer

BLOCK = 64


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "READ", BLOCK)


class InMemory(Writer):
    """Keeps what is written."""

    def __init__(self, size: int, positioned: bool = True) -> None:
        self.data, self.positioned = bytearray(size), positioned

    def write_at(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data

    def read_at(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@st.composite
def cut(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Some pieces, offset and length, that cover `size` bytes; some may be empty."""
    ends = sorted(draw(st.lists(st.integers(0, size), max_size=12)))
    starts = [0, *ends]
    return [(start, stop - start) for start, stop in zip(starts, [*ends, size], strict=True)]


@given(data=st.data(), size=st.integers(0, 5 * BLOCK), positioned=st.booleans())
def test_the_digests_are_those_of_the_bytes(data: st.DataObject, size: int, positioned: bool) -> None:
    content = random.Random(size).randbytes(size)
    named = [(at, length, f"t{n}") for n, (at, length) in enumerate(data.draw(cut(size)))][::2]
    writes = data.draw(cut(size))
    if positioned:
        writes = data.draw(st.permutations(writes))
    inner = InMemory(size, positioned)
    writer = DigestingWriter(inner, size, named, "sha256")
    writer.start()
    for at, length in writes:
        writer.write_at(at, memoryview(content)[at : at + length])
    writer.finish()
    assert bytes(inner.data) == content
    expected = {name: sha256(content[at : at + length]) for at, length, name in named}
    assert (writer.digests.file, writer.digests.tensors) == (sha256(content), expected)
    assert digests_of(inner.read_at, size, named, "sha256") == writer.digests


@pytest.mark.parametrize("positioned", [True, False])
def test_runs_count_as_they_are_written(positioned: bool) -> None:
    content = random.Random(0).randbytes(40 * BLOCK)
    writer = DigestingWriter(InMemory(len(content), positioned), len(content), [], "sha256")
    writer.start()
    for first in (1, 0) if positioned else ():
        offsets = range(first * 10, len(content), 20)
        packed = b"".join(content[at : at + 10] for at in offsets)
        writer.write_runs(iter(offsets), 10, memoryview(packed))
    if not positioned:
        writer.write_runs(iter(range(0, len(content), 10)), 10, memoryview(content))
    writer.finish()
    assert writer.digests.file == sha256(content)


def test_several_threads_write_one_file(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(1000 * BLOCK)
    inner = LocalWriter(str(tmp_path / "x"), len(content))
    writer = DigestingWriter(inner, len(content), [(0, len(content), "all")], "sha256")
    writer.start()
    pieces = list(range(0, len(content), 100))
    random.Random(2).shuffle(pieces)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda at: writer.write_at(at, memoryview(content)[at : at + 100]), pieces))
    writer.finish()
    inner.close()
    assert writer.digests.tensors == {"all": sha256(content)}


def test_what_is_complete_is_digested_before_the_rest_is_written() -> None:
    first = threading.Event()

    class Watched(InMemory):
        def read_at(self, offset: int, length: int) -> bytes:
            first.set()
            return super().read_at(offset, length)

    writer = DigestingWriter(Watched(4 * BLOCK), 4 * BLOCK, [], "sha256")
    writer.start()
    writer.write_at(0, memoryview(bytes(BLOCK)))
    assert first.wait(600)
    writer.give_up()


def test_where_no_thread_can_be_started_the_end_digests_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "start_threads", lambda threads: [])
    writer = DigestingWriter(InMemory(4 * BLOCK), 4 * BLOCK, [(1, 2, "a")], "sha256")
    writer.start()
    writer.write_at(0, memoryview(b"x" * 4 * BLOCK))
    writer.finish()
    assert (writer.digests.file, writer.digests.tensors) == (sha256(b"x" * 4 * BLOCK), {"a": sha256(b"xx")})


def test_a_file_that_cannot_be_read_back_is_an_error() -> None:
    class Broken(InMemory):
        def read_at(self, offset: int, length: int) -> bytes:
            raise FailedError("It cannot be read.")

    writer = DigestingWriter(Broken(4 * BLOCK), 4 * BLOCK, [], "sha256")
    writer.start()
    writer.write_at(0, memoryview(bytes(4 * BLOCK)))
    with pytest.raises(FailedError, match="cannot be read"):
        writer.finish()
