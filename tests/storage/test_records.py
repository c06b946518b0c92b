"""CRCs of pieces combine to that of the whole."""

from __future__ import annotations

import itertools
import random
import zlib

from hypothesis import given
from hypothesis import strategies as st

from ckptconv.storage.records import combine


@given(st.lists(st.binary(max_size=300), max_size=12), st.randoms(use_true_random=False))
def test_pieces_in_any_order_give_the_crc_of_the_whole(parts: list[bytes], chance: random.Random) -> None:
    pieces, at = [], 0
    for part in parts:
        pieces.append((at, len(part), zlib.crc32(part)))
        at += len(part)
    chance.shuffle(pieces)
    assert combine(pieces) == zlib.crc32(b"".join(parts))


def test_large_pieces() -> None:
    data = random.Random(0).randbytes(5_000_001)
    cuts = [0, 1, 1 << 20, 1 << 21, 3_999_999, len(data)]
    pieces = [(start, stop - start, zlib.crc32(data[start:stop])) for start, stop in itertools.pairwise(cuts)]
    assert combine(pieces) == zlib.crc32(data)
