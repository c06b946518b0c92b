"""CRC-32 and Adler-32 are the same, whichever package computes them, and the CRCs of pieces combine to that of the
whole."""

from __future__ import annotations

import itertools
import random
import sys
import zlib
from collections.abc import Iterator

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.storage import crc


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    crc.fastest.cache_clear()
    yield
    crc.fastest.cache_clear()


@examples(50)
@given(st.binary(max_size=5000), st.integers(0, 5000))
def test_they_are_those_of_zlib(data: bytes, cut: int) -> None:
    pytest.importorskip("zlib_ng")
    assert crc.fastest() is not zlib
    assert crc.crc32(memoryview(data)[cut:], crc.crc32(data[:cut])) == zlib.crc32(data)
    assert crc.adler32(memoryview(data)[cut:], crc.adler32(data[:cut])) == zlib.adler32(data)


def test_without_the_package_it_is_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zlib_ng", None)
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    assert crc.fastest() is zlib
    assert crc.crc32(b"123456789") == 0xCBF43926


@given(st.lists(st.binary(max_size=300), max_size=12), st.randoms(use_true_random=False))
def test_pieces_in_any_order_give_the_crc_of_the_whole(parts: list[bytes], chance: random.Random) -> None:
    pieces, at = [], 0
    for part in parts:
        pieces.append((at, len(part), zlib.crc32(part)))
        at += len(part)
    chance.shuffle(pieces)
    assert crc.combine(pieces) == zlib.crc32(b"".join(parts))


def test_large_pieces() -> None:
    data = random.Random(0).randbytes(5_000_001)
    cuts = [0, 1, 1 << 20, 1 << 21, 3_999_999, len(data)]
    pieces = [(start, stop - start, zlib.crc32(data[start:stop])) for start, stop in itertools.pairwise(cuts)]
    assert crc.combine(pieces) == zlib.crc32(data)
