"""Buffers in memory that are read as if they were one file."""

from __future__ import annotations

from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.features.saving.buffers import Buffers
from ckptconv.storage.files import Readers, holding


@examples(50)
@given(st.lists(st.binary(max_size=9), max_size=6), st.data())
def test_any_range_of_several_buffers_is_that_of_the_bytes_one_after_the_other(
    contents: list[bytes], data: st.DataObject
) -> None:
    buffers = Buffers("<held>")
    starts = [buffers.add(memoryview(each)) for each in contents]
    whole = b"".join(contents)
    assert buffers.file.size == len(whole)
    assert all(whole[at : at + len(each)] == each for at, each in zip(starts, contents, strict=True))
    start = data.draw(st.integers(0, len(whole)))
    cut = data.draw(st.integers(start, len(whole)))
    stop = data.draw(st.integers(cut, len(whole)))
    first, second = bytearray(cut - start), bytearray(stop - cut)
    with holding({"<held>": buffers}), Readers() as readers, readers.reading(buffers.file) as reader:
        reader.fill(start, [memoryview(first), memoryview(second)])
    assert bytes(first + second) == whole[start:stop]
