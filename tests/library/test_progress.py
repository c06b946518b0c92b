"""Progress wherever a program runs: bars of tqdm and rich, functions, threads, asyncio, other processes."""

from __future__ import annotations

import asyncio
import io
import itertools
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import rich.console
import rich.progress
import torch
from cells import VERIFIED, of_features, verified
from processes import prepared
from tqdm import tqdm

import ckptconv
from ckptconv.outputs.kinds import NAMED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.pt"
    torch.save({f"w{n}": torch.full((100_000,), float(n)) for n in range(8)}, path)
    return path


def bar_of(stream: io.StringIO, **options: Any) -> tqdm[Any]:
    return tqdm(file=stream, **options)


class Closing(tqdm):  # type: ignore[type-arg]
    """Tells what became of the bars of its class."""

    made: ClassVar[list[Closing]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "file": io.StringIO()})
        self.made.append(self)


@pytest.fixture
def made() -> list[Closing]:
    Closing.made.clear()
    return Closing.made


def tasks(stream: io.StringIO) -> rich.progress.Progress:
    return rich.progress.Progress(console=rich.console.Console(file=stream), auto_refresh=False)


def test_a_bar_of_tqdm_counts_bytes_and_stays_open(model: Path, tmp_path: Path) -> None:
    with bar_of(io.StringIO(), unit="B") as bar:
        for name in ("a", "b"):  # one bar for several calls
            report = ckptconv.convert(model, tmp_path / f"{name}.safetensors", progress=bar, fsync=False)
            assert bar.n == bar.total == report.bytes_written > 3_000_000
        assert not bar.disable


@pytest.mark.parametrize("output", ["one.safetensors", "several/", *(["back.pt"] if "pt" in NAMED else [])])
def test_what_is_counted_is_what_was_announced_with_verification_too(tmp_path: Path, output: str) -> None:
    """Verification counts tensors, not headers, and tensors that share memory each by itself."""
    numbers = torch.arange(1000.0)
    torch.save({"all": numbers, "some": numbers[10:900]}, tmp_path / "m.pt")
    source = tmp_path / "m.pt"
    if output == "back.pt":
        source = tmp_path / "m.safetensors"
        ckptconv.convert(tmp_path / "m.pt", source)
    totals: list[int] = []
    counts: list[int] = []
    ckptconv.convert(source, tmp_path / output, **VERIFIED, progress=counts.append, on_total=totals.append)
    assert totals == [sum(counts)]


def test_of_a_class_of_tqdm_a_bar_is_made_and_closed(model: Path, tmp_path: Path, made: list[Closing]) -> None:
    totals: list[int] = []
    ckptconv.convert(model, tmp_path / "a.safetensors", progress=Closing, on_total=totals.append)
    assert [bar.n for bar in made] == [bar.total for bar in made] == totals
    assert [(bar.desc, bar.unit, bar.disable) for bar in made] == [("convert", "B", True)]


def test_a_bar_is_closed_when_the_work_fails(model: Path, tmp_path: Path, made: list[Closing]) -> None:
    def stop() -> None:
        raise ckptconv.StoppedError("enough")

    with pytest.raises(ckptconv.StoppedError, match="enough"):
        ckptconv.convert(model, tmp_path / "a.safetensors", progress=Closing, before_commit=stop)
    assert [bar.disable for bar in made] == [True]
    assert os.listdir(tmp_path) == []
    with pytest.raises(ckptconv.UsageError):
        ckptconv.convert(tmp_path / "none.pt", progress=Closing)
    assert len(made) == 1


def test_a_progress_of_rich_gets_a_task_for_each_call(model: Path, tmp_path: Path) -> None:
    with tasks(io.StringIO()) as progress:
        report = ckptconv.convert(model, tmp_path / "a.safetensors", progress=progress)
        reports = verified(model, tmp_path / "a.safetensors", progress=progress)
    assert [(task.description, task.completed) for task in progress.tasks] == [
        ("convert", report.bytes_written), *(("verify", verification.bytes_compared) for verification in reports),
    ]  # fmt: skip
    assert all(task.finished for task in progress.tasks)


def test_of_the_class_of_rich_one_is_made_and_stopped(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckptconv.convert(model, tmp_path / "a.safetensors", progress=rich.progress.Progress)
    assert "convert" in capsys.readouterr().out


def test_true_shows_a_bar_and_nothing_shows_none(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for quiet in (None, False):
        ckptconv.convert(model, tmp_path / "a.safetensors", progress=quiet)
        assert capfd.readouterr() == ("", "")
    ckptconv.convert(model, tmp_path / "a.safetensors", progress=True)
    out, err = capfd.readouterr()
    assert "convert" in err
    assert "100%" in err
    assert out == ""


@pytest.mark.parametrize("given", [3, "yes", [], int, object()])
def test_anything_else_is_refused(given: Any, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ckptconv.UsageError, match="cannot show progress"):
        ckptconv.convert(model, tmp_path / "a.safetensors", progress=given)
    assert os.listdir(tmp_path) == []


def test_every_call_that_moves_bytes_takes_it(model: Path, tmp_path: Path) -> None:
    for call in itertools.chain(*of_features("MOVING")):
        with bar_of(io.StringIO()) as bar:
            call(model, tmp_path, bar)
            assert bar.n == bar.total > 4000


# ------------------------------------------------------------------------------------------- where programs run


def test_in_threads(model: Path, tmp_path: Path) -> None:
    with tasks(io.StringIO()) as progress, ThreadPoolExecutor(4) as pool:
        names = [tmp_path / f"{n}.safetensors" for n in range(4)]
        reports = list(pool.map(lambda name: ckptconv.convert(model, name, progress=progress, jobs=2), names))
    assert [task.completed for task in progress.tasks] == [report.bytes_written for report in reports]
    assert len({name.read_bytes() for name in names}) == 1


def test_in_asyncio(model: Path, tmp_path: Path) -> None:
    async def main() -> ckptconv.Report:
        return await asyncio.to_thread(ckptconv.convert, model, tmp_path / "a.safetensors")

    assert asyncio.run(main()).bytes_written == (tmp_path / "a.safetensors").stat().st_size


def test_cancelled_in_asyncio_it_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    def progress(count: int) -> None:
        begun.set()
        assert cancelled.wait(600)
        raise ckptconv.StoppedError("cancelled")

    async def main() -> None:
        work = asyncio.create_task(
            asyncio.to_thread(ckptconv.convert, model, tmp_path / "a.safetensors", progress=progress)
        )
        await asyncio.to_thread(begun.wait)
        work.cancel()
        try:
            await work
        finally:
            cancelled.set()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert os.listdir(tmp_path) == []


INTERRUPTED = """
import itertools, os, signal, sys, threading, time
import ckptconv

calls = itertools.count()

def progress(count):
    # Once: a second one, while the first is cleaned up after, ends the cleaning.
    if next(calls) == 0:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)  # in one of the threads, which must be waited for

try:
    ckptconv.convert(sys.argv[1], sys.argv[2], progress=progress, jobs=2)
except KeyboardInterrupt:
    assert threading.active_count() == 1
    print("interrupted")
"""


def test_ctrl_c_in_the_main_thread_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    done = prepared().run(INTERRUPTED, model, tmp_path / "a.safetensors")
    assert (done.stdout, done.stderr) == ("interrupted\n", "")
    assert os.listdir(tmp_path) == []


def test_in_processes_that_are_spawned(model: Path, tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(ckptconv.convert, model, tmp_path / "a.safetensors").result().bytes_written > 3_000_000
        error = pool.submit(ckptconv.convert, tmp_path / "none.pt").exception()
    assert isinstance(error, ckptconv.UsageError)
