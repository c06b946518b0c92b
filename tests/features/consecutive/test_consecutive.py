"""Pickles that follow each other are read once, whatever is between them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ckptconv.errors import TruncatedError
from ckptconv.features.consecutive.pickles import Pickles
from ckptconv.pickles.vocabulary import DEFAULT_LIMITS
from ckptconv.storage.files import LocalReader, look
from ckptconv.storage.reading import Reader

DATA = random.Random(3).randbytes(100_000)


class Counting(Reader):
    """Keeps what it is asked for."""

    def __init__(self, reader: Reader) -> None:
        self.file, self._reader = reader.file, reader
        self.asked: list[tuple[int, int]] = []

    def read_at(self, offset: int, length: int) -> bytes:
        self.asked.append((offset, length))
        return self._reader.read_at(offset, length)


def test_reading_on_reads_nothing_again(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    reader = Counting(LocalReader(look(str(tmp_path / "data")).file))
    stop = len(DATA) - 7
    pickles = Pickles(reader, 0, stop, DEFAULT_LIMITS, window=1)
    for offset, length in ((0, 100), (0, 200), (150, 100), (900, 50)):
        pickles.position = offset
        assert pickles.take(length, "the data") == DATA[offset : offset + length]
        assert pickles.position == offset + length
    pickles.position = 900
    with pytest.raises(TruncatedError, match="within the data"):
        pickles.take(stop, "the data")
    assert reader.asked == [(0, 100), (100, 100), (200, 50), (900, 50), (950, stop - 950)]
    reader._reader.close()
