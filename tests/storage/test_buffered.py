"""Descriptions are read in blocks, some of which are kept; the bytes are those of the file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ckptconv.errors import CorruptError
from ckptconv.storage.buffered import BUFFERS_KEPT, LOCAL_BUFFER, MAX_BUFFERED, BufferedReader
from ckptconv.storage.files import LocalReader, look, open_reader
from ckptconv.storage.reading import Reader

DATA = random.Random(3).randbytes(64 * LOCAL_BUFFER)


class Counting(Reader):
    """Keeps what it is asked for."""

    def __init__(self, reader: Reader) -> None:
        self.file, self._reader = reader.file, reader
        self.asked: list[tuple[int, int]] = []

    def read_at(self, offset: int, length: int) -> bytes:
        self.asked.append((offset, length))
        return self._reader.read_at(offset, length)


@pytest.fixture
def counting(tmp_path: Path) -> Counting:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    return Counting(LocalReader(look(str(path)).file))


@pytest.mark.parametrize("around", [False, True])
def test_any_reads_give_the_bytes_of_the_file(around: bool, counting: Counting) -> None:
    reader, rng = BufferedReader(counting, around), random.Random(5)
    for _ in range(500):
        offset = rng.randrange(len(DATA))
        length = min(rng.choice([1, 30, LOCAL_BUFFER, 3 * LOCAL_BUFFER]), len(DATA) - offset)
        assert reader.read_at(offset, length) == DATA[offset : offset + length]
    assert reader.bytes_read == sum(length for _, length in counting.asked)


def test_what_is_near_is_read_once(counting: Counting) -> None:
    reader = BufferedReader(counting)
    for offset in range(0, LOCAL_BUFFER, 64):
        reader.read_at(offset, 64)
    assert counting.asked == [(0, LOCAL_BUFFER)]
    reader.read_at(len(DATA) - 10, 10)
    reader.read_at(len(DATA) - 100, 10)  # the end of a file is read backwards
    assert counting.asked[1:] == [(len(DATA) - LOCAL_BUFFER, LOCAL_BUFFER)]


def test_around_what_is_asked_for_lies_what_comes_before_it(counting: Counting) -> None:
    reader = BufferedReader(counting, around=True)
    at = 8 * LOCAL_BUFFER
    for offset in (at, at - LOCAL_BUFFER, at + LOCAL_BUFFER):
        assert reader.read_at(offset, 4) == DATA[offset : offset + 4]
    assert counting.asked == [(at - LOCAL_BUFFER, 2 * LOCAL_BUFFER + 4)]


def test_the_last_blocks_are_kept_and_not_more(counting: Counting) -> None:
    reader = BufferedReader(counting)
    places = [at * LOCAL_BUFFER for at in range(BUFFERS_KEPT + 1)]
    for offset in places:
        reader.read_at(offset, 4)
    reader.read_at(places[1], 4)
    assert len(counting.asked) == len(places)
    reader.read_at(places[0], 4)
    assert len(counting.asked) == len(places) + 1
    assert BUFFERS_KEPT * LOCAL_BUFFER < MAX_BUFFERED


def test_a_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    reader = open_reader(str(tmp_path / "short"), around=True)
    with pytest.raises(CorruptError, match="ends at byte 3"):
        reader.read_at(0, 4)
    reader.close()
