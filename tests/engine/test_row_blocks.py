"""Tensors that are columns of the same rows: read once, whatever the plan, the buffers and the order."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ckptconv.engine.execute import carry_out
from ckptconv.engine.rows import strided_rows
from ckptconv.engine.tasks import RowBlock, tasks
from ckptconv.outputs import safetensors
from ckptconv.plan import Checked, Data, FilePlan, Literal, Trailer
from ckptconv.storage.files import Readers, look
from ckptconv.storage.writing import LocalWriter
from ckptconv.tensors.computing import Bits
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Concat, Convert, LazyTensor, Stored, View, Zeros

U8, U4 = DTYPES["uint8"], DTYPES["uint32"]


class Table:
    """Rows of random bytes in a file, and columns of them as tensors with what they are to be."""

    def __init__(self, path: Path, count: int, width: int, *, seed: int = 0, at: int = 0) -> None:
        self.rows = np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)
        path.write_bytes(b"x" * at + self.rows.tobytes())
        self.file, self.at = look(str(path)).file, at

    def column(self, low: int, high: int) -> tuple[LazyTensor, bytes]:
        count, width = self.rows.shape
        stored = Stored(self.file, self.at + low, U8, (count, high - low), (width, 1))
        return stored, self.rows[:, low:high].tobytes()


class NotZeroError(Exception):
    """What was left out holds something."""


def all_zero(data: memoryview) -> None:
    if any(data):
        raise NotZeroError


def plan_of(columns: dict[str, tuple[LazyTensor, bytes]], *blank: LazyTensor) -> tuple[FilePlan, bytes]:
    """A file with a header and these tensors, and what it is to hold."""
    parts: list[Any] = [Literal(0, b"header")]
    content = b"header"
    for name, (tensor, data) in columns.items():
        parts.append(Data(len(content), tensor, name))
        content += data
    parts.extend(Checked(len(content), tensor, all_zero) for tensor in blank)
    return FilePlan("x", len(content), tuple(parts)), content


def made(path: Path, plan: FilePlan, *, jobs: int = 1, memory: int = 1 << 20) -> tuple[bytes, int]:
    """What carrying out `plan` makes, and how many bytes were read for it."""
    writer = LocalWriter(str(path), plan.size)
    try:
        with Readers() as readers:
            tally = carry_out(plan, writer, readers, jobs=jobs, memory=memory)
    finally:
        writer.close()
    assert tally.bytes_written == plan.size
    return path.read_bytes(), tally.bytes_read


def is_shared(plan: FilePlan) -> bool:
    return any(isinstance(task, RowBlock) for task in tasks(plan, 1 << 16, positioned=True))


cuts = st.lists(st.integers(0, 400), min_size=3, max_size=9, unique=True).map(sorted)


@examples(40, HealthCheck.function_scoped_fixture)
@given(
    cuts=cuts,
    count=st.integers(1, 900),
    jobs=st.integers(1, 3),
    memory=st.sampled_from([1 << 12, 1 << 14, 1 << 20]),
    chosen=st.sets(st.integers(0, 8), min_size=1),
    order=st.randoms(use_true_random=False),
)
def test_any_columns_of_any_rows_come_out_right(
    tmp_path: Path, cuts: list[int], count: int, jobs: int, memory: int, chosen: set[int], order: Any
) -> None:
    table = Table(tmp_path / "rows", count, cuts[-1], at=7)
    spans = [span for index, span in enumerate(itertools.pairwise(cuts)) if index in chosen]
    order.shuffle(spans)
    plan, content = plan_of({f"{low}-{high}": table.column(low, high) for low, high in spans})
    assert made(tmp_path / "out", plan, jobs=jobs, memory=memory)[0] == content


def test_columns_that_make_up_most_of_the_rows_are_read_once(tmp_path: Path) -> None:
    table = Table(tmp_path / "rows", 5000, 9000)
    columns = {"a": table.column(0, 8), "b": table.column(8, 3000), "c": table.column(3000, 9000)}
    plan, content = plan_of(columns)
    assert is_shared(plan)
    assert made(tmp_path / "out", plan, memory=1 << 20) == (content, table.rows.nbytes)


def test_rows_of_which_little_is_taken_or_that_fit_no_buffer_are_not_read_whole(tmp_path: Path) -> None:
    table = Table(tmp_path / "rows", 50, 70_000)
    few, content = plan_of({"a": table.column(0, 8), "b": table.column(60_000, 60_100)})
    assert not is_shared(few)
    assert made(tmp_path / "out", few) == (content, 50 * 108)
    wide, content = plan_of({"a": table.column(0, 8), "b": table.column(8, 70_000)})
    assert not is_shared(wide)
    assert made(tmp_path / "out", wide)[0] == content


def test_rows_in_several_files_are_shared_part_by_part(tmp_path: Path) -> None:
    one, two = Table(tmp_path / "1", 700, 40), Table(tmp_path / "2", 333, 40, seed=1, at=3)
    columns = {}
    for low, high in ((0, 8), (8, 20), (20, 40)):
        (first, data), (second, more) = one.column(low, high), two.column(low, high)
        columns[f"{low}"] = (Concat((first, second)), data + more)
    plan, content = plan_of(columns)
    assert is_shared(plan)
    assert made(tmp_path / "out", plan, memory=1 << 14) == (content, one.rows.nbytes + two.rows.nbytes)


def test_what_is_made_of_columns_by_kernels_and_joined_of_several_is_shared_too(tmp_path: Path) -> None:
    table = Table(tmp_path / "rows", 1000, 24)
    words = Stored(table.file, 8, U4, (1000,), (6,))
    numbers = table.rows[:, 8:12].copy().view("<u4")[:, 0]
    left, right = table.column(0, 8), table.column(12, 24)
    columns = {
        "bits": (Convert(words, Bits(4, 3, 20, 4), U4), (numbers >> 3 & 0xFFFFF).astype("<u4").tobytes()),
        "flag": (Convert(words, Bits(4, 31, 1, 1), DTYPES["bool"]), (numbers >> 31).astype("u1").tobytes()),
        "ends": (Concat((left[0], right[0]), 1), np.delete(table.rows, [8, 9, 10, 11], axis=1).tobytes()),
        "seen": (View(words, DTYPES["float32"], (1000, 1)), numbers.tobytes()),
    }
    plan, content = plan_of(columns)
    assert is_shared(plan)
    assert made(tmp_path / "out", plan, jobs=2, memory=1 << 14) == (content, table.rows.nbytes)


def checksum(name: str, digests: Mapping[str, int]) -> bytes:
    return digests[name].to_bytes(4, "little")


def test_the_checksums_beside_the_columns_are_those_of_what_they_are(tmp_path: Path) -> None:
    table = Table(tmp_path / "rows", 3000, 40)
    parts: list[Any] = []
    expected = b""
    for name, (tensor, data) in {"left": table.column(0, 16), "right": table.column(16, 40)}.items():
        at = len(expected)
        parts += [Data(at, tensor, name), Trailer(at + len(data), 4, functools.partial(checksum, name), name)]
        expected += data + zlib.crc32(data).to_bytes(4, "little")
    plan = FilePlan("x", len(expected), tuple(parts))
    assert is_shared(plan)
    assert made(tmp_path / "out", plan, jobs=2, memory=1 << 15) == (expected, table.rows.nbytes)


@pytest.mark.parametrize("memory", [1 << 12, 1 << 20])
@pytest.mark.parametrize("count", [1, 4000])
def test_what_is_left_out_as_blank_is_all_zero_or_nothing_is_made(tmp_path: Path, count: int, memory: int) -> None:
    table = Table(tmp_path / "rows", count, 20)
    table.rows[:, 8:12] = 0
    (tmp_path / "rows").write_bytes(table.rows.tobytes())
    columns = {"a": table.column(0, 8), "b": table.column(12, 20)}
    plan, content = plan_of(columns, table.column(8, 12)[0])
    written, read = made(tmp_path / "out", plan, memory=memory)
    assert written == content
    assert read == table.rows.nbytes or count == 1
    table.rows[-1, 11] = 1
    (tmp_path / "rows").write_bytes(table.rows.tobytes())
    with pytest.raises(NotZeroError):
        made(tmp_path / "out", plan, memory=memory)


def test_a_blank_that_shares_no_rows_is_checked_by_itself(tmp_path: Path) -> None:
    table = Table(tmp_path / "rows", 10, 100_000)
    plan, _ = plan_of({"a": table.column(0, 8)}, Zeros(U8, (300_000,)))
    made(tmp_path / "out", plan)
    plan, _ = plan_of({"a": table.column(0, 8)}, table.column(0, 100_000)[0])
    with pytest.raises(NotZeroError):
        made(tmp_path / "out", plan, memory=1 << 12)


def test_a_lane_is_what_lies_in_rows_and_nothing_else(tmp_path: Path) -> None:
    table = Table(tmp_path / "rows", 10, 100)
    column, _ = table.column(10, 20)
    found = strided_rows(column)
    assert found is not None
    assert found.rows == ((table.file, 10, 100),)
    assert found.offsets == (10,)
    whole, _ = table.column(0, 100)
    transposed = Stored(table.file, 0, U8, (100, 10), (1, 100))
    empty = Stored(table.file, 0, U8, (0, 4), (100, 1))
    scalar = Stored(table.file, 0, U8, (), ())
    others = [whole, transposed, empty, scalar, View(column, U8, (100,)), Zeros(U8, (10, 10))]
    assert [strided_rows(each) for each in [*others, Concat((whole, whole)), Concat((column, whole), 1)]] == [None] * 8
    moved = Stored(table.file, 110, U8, (10, 10), (100, 1))
    assert strided_rows(Concat((column, moved), 1)) is None  # not of the same row


def test_views_of_a_fused_weight_are_read_once(tmp_path: Path) -> None:
    """Query, key and value as they are often saved: columns of one storage."""
    table = Table(tmp_path / "rows", 256, 3 * 512)
    names = {name: table.column(512 * index, 512 * (index + 1)) for index, name in enumerate("qkv")}
    plan = safetensors.file_plan("x", {name: tensor for name, (tensor, _) in names.items()}, {"format": "pt"})
    content, read = made(tmp_path / "out", plan)
    assert read == table.rows.nbytes
    assert all(data in content for _, data in names.values())
