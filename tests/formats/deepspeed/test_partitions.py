"""How parameters that are in one list are divided into groups of known sizes."""

from __future__ import annotations

from ckptconv.formats.deepspeed.partitions import split_list


def test_a_group_may_be_padded_to_the_next_multiple_of_its_unit_and_no_further() -> None:
    assert split_list([9, 4], [(10, 2), (4, 2)]) == [range(1), range(1, 2)]
    assert split_list([10], [(10, 2)]) == [range(1)]
    assert split_list([10], [(12, 2)]) is None
