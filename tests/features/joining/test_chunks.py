"""What makes a tensor of chunks of it, and what says that they do not."""

from __future__ import annotations

import pytest

from ckptconv.errors import CorruptError
from ckptconv.features.joining.chunks import ChunkTile, join
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Stored
from ckptconv.tensors.moves import File

U8 = DTYPES["uint8"]


def tile(offsets: tuple[int, ...], shape: tuple[int, ...]) -> ChunkTile:
    return ChunkTile(offsets, Stored(File("0.distcp", 1 << 20), 0, U8, shape, (shape[-1], 1)[-len(shape) :]))


def test_one_element_more_than_there_are_overlaps() -> None:
    with pytest.raises(CorruptError, match="its chunks have 1 more: they overlap"):
        join(U8, (4,), [tile((0,), (4,)), tile((3,), (1,))], lambda: "w")


def test_a_hole_at_the_end_of_a_row_is_named_although_another_row_has_as_much_too_much() -> None:
    first = [tile((0, 0), (1, 2)), tile((0, 2), (1, 1))]
    second = [tile((1, 0), (1, 4)), tile((1, 3), (1, 1))]
    with pytest.raises(CorruptError, match=r"covers index 3 of dimension 1 in the region from \[0, 0\] to \[1, 4\]"):
        join(U8, (2, 4), [*first, *second], lambda: "w")
