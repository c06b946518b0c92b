"""A conversion whose files are made by an executor's workers: threads, processes."""

from __future__ import annotations

from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SHARDS, ZERO, contents, model_and_shards

import ckptconv as library
from ckptconv.errors import CorruptError, FailedError, UsageError
from ckptconv.outputs.kinds import FURTHER

SHARD = 100_000


model, expected = model_and_shards(SHARD)


class Inline(Executor):
    """Does at once what it is given; can lose the n-th task."""

    def __init__(self, lost: int = -1) -> None:
        self.submitted: list[Any] = []
        self.lost = lost

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.submitted.append(args[0])
        try:
            if len(self.submitted) - 1 == self.lost:
                raise BrokenProcessPool("a worker died")
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def test_threads_and_processes_make_the_same_as_one_process(
    model: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    for number, make in enumerate(
        (lambda: ThreadPoolExecutor(2), lambda: ProcessPoolExecutor(2, mp_context=get_context("spawn")))
    ):
        done: list[int] = []
        total: list[int] = []
        with make() as executor:
            report = library.convert(
                model, tmp_path / str(number), max_shard_size=SHARD, executor=executor, progress=done.append,
                on_total=total.append,
            )  # fmt: skip
        assert contents(tmp_path / str(number)) == expected
        assert sum(done) == total[0] == report.bytes_written
        assert report.bytes_read > SHARDS * SHARD


def test_one_task_for_each_file_the_largest_first(model: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    executor = Inline()
    library.convert(model, tmp_path / "out", max_shard_size=SHARD, executor=executor)
    assert {task.file.name for task in executor.submitted} == set(expected) - {".ckptconv-manifest.json"}
    sizes = [task.file.size for task in executor.submitted]
    assert sizes == sorted(sizes, reverse=True)
    assert contents(tmp_path / "out") == expected


def test_outputs_of_every_kind(tmp_path: Path) -> None:
    source = ZERO / "z3_bf16_w2" / "checkpoint"
    for place, executor in (("one", None), ("many", ThreadPoolExecutor(2))):
        at = tmp_path / place
        at.mkdir()
        library.convert(
            source, at / "model", executor=executor, **{name: str(at / name) for name in FURTHER},
        )  # fmt: skip
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


def test_checksums_are_checked_where_the_files_are_made(model: Path, tmp_path: Path) -> None:
    report = library.convert(model, tmp_path / "out", max_shard_size=SHARD, checksum=True, executor=Inline())
    assert report.checksums == SHARDS
    broken = tmp_path / "broken.pt"
    data = bytearray(model.read_bytes())
    data[data.index(torch.full((4,), 3.0).numpy().tobytes())] ^= 1
    broken.write_bytes(data)
    with pytest.raises(CorruptError, match="layer3"):
        library.convert(broken, tmp_path / "new", max_shard_size=SHARD, checksum=True, executor=Inline())
    assert not (tmp_path / "new").exists()


def test_a_broken_pool_is_an_error_and_the_next_run_goes_on(
    model: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    with pytest.raises(FailedError, match="BrokenProcessPool: a worker died"):
        library.convert(model, tmp_path / "out", max_shard_size=SHARD, executor=Inline(lost=3))
    assert not list((tmp_path / "out").glob("*.safetensors"))
    report = library.convert(model, tmp_path / "out", max_shard_size=SHARD)
    assert report.reused >= 3
    assert contents(tmp_path / "out") == expected


def test_the_process_that_writes_a_file_digests_it(model: Path, tmp_path: Path) -> None:
    for name, executor in (("here", None), ("there", ThreadPoolExecutor(2))):
        library.convert(model, tmp_path / name, executor=executor, max_shard_size=SHARD, digest="sha256")
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def test_what_is_no_executor_is_refused(model: Path, tmp_path: Path) -> None:
    other: Any = 5
    with pytest.raises(UsageError, match=r"executor 5 is not a concurrent\.futures executor"):
        library.convert(model, tmp_path / "out", executor=other)
