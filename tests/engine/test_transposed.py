"""Tensors that the files have in another order than the output: what is made of them, by how many reads and writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ckptconv.engine.execute import carry_out, is_scattered
from ckptconv.options.table import Options
from ckptconv.plan import Data, FilePlan, Literal
from ckptconv.storage.files import LocalReader, Readers, look
from ckptconv.storage.writing import LocalWriter
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Concat, Convert, LazyTensor, Stored
from ckptconv.tensors.moves import Cast
from ckptconv.tensors.strides import contiguous_strides

HEAD = b"header"


def stored(path: Path, shape: tuple[int, ...], order: Sequence[int]) -> tuple[Stored, np.ndarray]:
    """A tensor of `shape` whose dimensions the file has in `order`, and what it is to be."""
    extents = [shape[dim] for dim in order]
    there = np.arange(math.prod(shape), dtype="float32").reshape(extents)
    path.write_bytes(there.tobytes())
    steps = dict(zip(order, contiguous_strides(extents), strict=True))
    strides = tuple(steps[dim] for dim in range(len(shape)))
    return Stored(look(str(path)).file, 0, DTYPES["float32"], shape, strides), there.transpose(np.argsort(order))


def made(path: Path, tensor: LazyTensor, memory: int, jobs: int | None = 1) -> bytes:
    plan = FilePlan("x", len(HEAD) + tensor.nbytes, (Literal(0, HEAD), Data(len(HEAD), tensor, "w")))
    writer = LocalWriter(str(path), plan.size)
    try:
        with Readers() as readers:
            carry_out(plan, writer, readers, jobs=jobs, memory=memory)
    finally:
        writer.close()
    content = path.read_bytes()
    assert content.startswith(HEAD)
    return content[len(HEAD) :]


@examples(60, HealthCheck.function_scoped_fixture)
@given(
    shape=st.lists(st.sampled_from([1, 2, 7, 16, 33, 90]), min_size=2, max_size=4).filter(lambda s: math.prod(s) < 1e5),
    order=st.randoms(use_true_random=False),
    memory=st.sampled_from([1 << 10, 1 << 12, 1 << 14, 1 << 20]),
    dtype=st.sampled_from([None, "float64", "float16"]),
    jobs=st.sampled_from([1, 2]),
    joined=st.sampled_from([None, 0, 1]),
)
def test_they_are_what_numpy_makes_of_them_whatever_the_memory(
    shape: list[int], order: object, memory: int, dtype: str | None, jobs: int, joined: int | None, tmp_path: Path
) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)  # type: ignore[attr-defined]
    tensor: LazyTensor
    tensor, expected = stored(tmp_path / "source", tuple(shape), dims)
    if joined is not None:
        tensor, expected = Concat((tensor, tensor), joined), np.concatenate([expected, expected], joined)
    if dtype:
        tensor = Convert(tensor, Cast("float32", dtype), DTYPES[dtype])
        expected = expected.astype(dtype)
    assert made(tmp_path / "made", tensor, memory, jobs) == np.ascontiguousarray(expected).tobytes()


def test_a_matrix_is_read_in_runs_and_written_at_once_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, expected = stored(tmp_path / "source", (2000, 160), (1, 0))
    reads: list[tuple[int, int]] = []
    writes: list[tuple[int, int]] = []

    def fill_runs(self: LocalReader, offsets: Iterable[int], length: int, out: memoryview) -> None:
        known = list(offsets)
        reads.append((len(known), length))
        read(self, known, length, out)

    def write_runs(self: LocalWriter, offsets: Iterable[int], length: int, data: memoryview) -> None:
        known = list(offsets)
        writes.append((len(known), length))
        write(self, known, length, data)

    def write_at(self: LocalWriter, offset: int, data: memoryview) -> None:
        writes.append((1, len(data)))
        at(self, offset, data)

    read, write, at = LocalReader.fill_runs, LocalWriter.write_runs, LocalWriter.write_at
    monkeypatch.setattr(LocalReader, "fill_runs", fill_runs)
    monkeypatch.setattr(LocalWriter, "write_runs", write_runs)
    monkeypatch.setattr(LocalWriter, "write_at", write_at)
    assert made(tmp_path / "made", tensor, 1 << 20) == np.ascontiguousarray(expected).tobytes()
    # In half of the memory are 51 cache lines of each row of the source; a piece of the result takes at most a quarter.
    assert reads == [(160, 816 * 4), (160, 816 * 4), (160, 368 * 4)]
    assert writes == [(1, len(HEAD)), *[(1, rows * 160 * 4) for rows in (*[408] * 4, 368)]]


def test_they_have_more_memory_by_default_and_never_more_than_what_is_asked_for(tmp_path: Path) -> None:
    tensor, _ = stored(tmp_path / "source", (600, 512), (1, 0))
    rows = Stored(tensor.file, 0, tensor.dtype, (600, 512), (512, 1))
    for each, scattered in (
        (tensor, True),
        (rows, False),
        (Convert(tensor, Cast("float32", "float16"), DTYPES["float16"]), True),
    ):
        plan = FilePlan("x", each.nbytes, (Data(0, each, "w"),))
        assert is_scattered(plan) is scattered
    mixed = [Data(at * rows.nbytes, tensor if at == 1 else rows, str(at)) for at in range(3)]
    assert not is_scattered(FilePlan("x", 3 * rows.nbytes, tuple(mixed)))
    assert Options().buffers(far=False, scattered=True) == 16 << 20
    assert Options().buffers(far=True, scattered=True) == 24 << 20
    assert Options().buffers(far=False) == 8 << 20
    for memory in (4 << 20, 8 << 20):
        assert Options(memory=memory).buffers(far=True, scattered=True) == memory
