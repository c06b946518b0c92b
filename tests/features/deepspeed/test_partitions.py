"""How parameters that are in one list are divided into groups of known sizes."""

from __future__ import annotations

import math

from ckptconv.features.deepspeed.partitions import cut_flat, split_list, walk_flat
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Stored
from ckptconv.tensors.moves import File


def test_parameters_come_from_the_partitions_of_all_ranks_one_after_the_other() -> None:
    """Also those that begin in one and end in another."""
    shapes = {"a": (2, 3), "b": (5,), "c": (), "d": (4, 2)}
    for ranks in (1, 2, 4):
        size = 20 // ranks
        parts = [
            Stored(File(f"rank{rank}", 4 * size, None), 0, DTYPES["float32"], (size,), (1,)) for rank in range(ranks)
        ]
        at = 0
        for name, tensor in cut_flat(walk_flat(shapes)[0], parts):
            numel = math.prod(shapes[name])
            assert tensor.shape == shapes[name]
            expected = {f"rank{element // size}" for element in range(at, at + numel)}
            assert {file.path for file in tensor.inputs()} >= expected, (ranks, name)
            first = next(iter(tensor.moves(0, 4 * numel)))
            assert first.file is not None
            assert (first.file.path, first.source.offset) == (f"rank{at // size}", 4 * (at % size)), (ranks, name)
            at += numel
        assert at == 20


def test_a_group_may_be_padded_to_the_next_multiple_of_its_unit_and_no_further() -> None:
    assert split_list([9, 4], [(10, 2), (4, 2)]) == [range(1), range(1, 2)]
    assert split_list([10], [(10, 2)]) == [range(1)]
    assert split_list([10], [(12, 2)]) is None
