"""Files that are written, and steps that wait for the disk in threads of their own."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
from effort import TIMES

from ckptconv import process
from ckptconv.storage import syncing as syncing_module
from ckptconv.storage import writing
from ckptconv.storage.syncing import Syncing
from ckptconv.storage.writing import LocalWriter


def test_every_step_runs() -> None:
    done: list[int] = []
    with Syncing() as syncing:
        for number in range(99):
            syncing.add(lambda number=number: done.append(number))  # type: ignore[misc]
    assert sorted(done) == [*range(99)]


def test_it_waits_for_a_step_however_long_that_takes() -> None:
    done: list[int] = []
    with Syncing() as syncing:
        syncing.add(lambda: (time.sleep(0.1), done.append(1)))  # type: ignore[arg-type, return-value]
    assert done


def test_steps_wait_for_the_disk_together() -> None:
    """A journal of a file system is then written once for all of them."""
    together = threading.Barrier(4, timeout=60)

    def step() -> None:
        together.wait()

    with Syncing() as syncing:
        for _ in range(4):
            syncing.add(step)


def test_after_an_error_the_steps_that_are_left_do_not_run() -> None:
    done: list[int] = []
    stopped = threading.Event()

    def fail() -> NoReturn:
        stopped.set()
        raise OSError("the disk is gone")

    def work(syncing: Syncing) -> None:
        with syncing:
            syncing.add(fail)
            assert stopped.wait(60)
            while not syncing._stopped:
                time.sleep(0.001)
            syncing.add(lambda: done.append(1))

    with pytest.raises(OSError, match="the disk is gone"):
        work(Syncing())
    assert not done


def test_where_no_thread_can_be_started_steps_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    done: list[int] = []
    with Syncing() as syncing:
        for number in range(3):
            syncing.add(lambda number=number: done.append(number))  # type: ignore[misc]
            assert done == [*range(number + 1)]


def test_a_signal_while_the_thread_starts_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python does not expect an exception there: it forgets the thread, which then ends with a traceback."""
    usual, start = threading._start_new_thread, threading.Thread.start  # type: ignore[attr-defined]
    interrupted: list[threading.Thread] = []

    def disturbed(*arguments: Any) -> Any:
        found = usual(*arguments)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        return found

    def watched(thread: threading.Thread) -> None:
        try:
            start(thread)
        except InterruptedError:
            interrupted.append(thread)
            raise

    def stop(*_: object) -> NoReturn:
        raise InterruptedError

    before, handler = set(threading.enumerate()), signal.signal(signal.SIGUSR1, stop)
    monkeypatch.setattr(threading.Thread, "start", watched)
    monkeypatch.setattr(threading, "_start_new_thread", disturbed)
    done: list[str] = []
    try:
        with pytest.raises(InterruptedError), Syncing() as syncing:
            syncing.add(lambda: done.append("step"))
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert not set(threading.enumerate()) - before
    assert not done
    assert not interrupted


def interrupted_at(instruction: int, work: Callable[[], None]) -> bool:
    """Whether `work` ended before InterruptedError was raised at an `instruction` of it, counted in the code that waits
    for threads. Python blocks signals while a thread starts."""
    left = instruction
    files = (syncing_module.__file__, process.__file__, queue.__file__, threading.__file__)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files or frame.f_code.co_name == "start_threads":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not any(caller.f_code.co_name == "start_threads" for caller in callers(frame)):
            left -= 1
            if not left:
                sys.settrace(None)
                raise InterruptedError
        return trace

    sys.settrace(trace)
    try:
        work()
    except InterruptedError:
        return False
    finally:
        sys.settrace(None)
    return True


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame := frame and frame.f_back:
        yield frame


def test_a_signal_at_any_instruction_lets_it_wait_for_its_threads() -> None:
    """A queue that lost the call that wakes its threads, or a lock that stays held, would let it wait for ever."""
    before, complete = set(threading.enumerate()), False

    def work(instruction: int) -> None:
        nonlocal complete
        syncing = Syncing()

        def sync() -> None:
            with syncing:
                for _ in range(2):
                    syncing.add(lambda: None)
                syncing.finish()

        complete = interrupted_at(instruction, sync)
        if not complete:
            syncing.finish()

    # Every third one finds the faults that were seen; all are tried with `make thorough`.
    for instruction in itertools.count(1, 3 if TIMES == 1 else 1):
        trying = threading.Thread(target=work, args=(instruction,), daemon=True)
        trying.start()
        trying.join(20)
        assert not trying.is_alive(), f"it waits for ever after a signal at instruction {instruction}"
        assert not set(threading.enumerate()) - before
        if complete:
            break
    assert instruction > 100


def test_a_large_file_has_room_on_the_disk_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[tuple[int, ...]] = []
    monkeypatch.setattr(writing, "call", {"fallocate": lambda fd, *room: reserved.append(room)}.get)
    for size in (writing.LARGE - 1, writing.LARGE):
        LocalWriter(str(tmp_path / f"{size}"), size).close()
    assert reserved == [(0, 0, writing.LARGE)]


def test_without_such_a_call_of_the_system_files_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "call", lambda name: None)
    writer = LocalWriter(str(tmp_path / "file"), writing.LARGE, durable=True)
    writer.write_at(writing.LARGE - 1, memoryview(b"x"))
    writer.close()
    assert (tmp_path / "file").stat().st_size == writing.LARGE


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other calls")
def test_the_calls_of_the_system_do_what_they_are_for(tmp_path: Path) -> None:
    reserve, begin = writing.call("fallocate"), writing.call("sync_file_range")
    assert reserve
    assert begin
    with (tmp_path / "file").open("wb") as file:
        if reserve(file.fileno(), 0, 0, 1 << 20):
            pytest.skip("this file system reserves no room")
        assert os.fstat(file.fileno()).st_size == 1 << 20
        assert os.fstat(file.fileno()).st_blocks * 512 >= 1 << 20
        assert begin(file.fileno(), 0, 0, writing.SYNC_FILE_RANGE_WRITE) == 0
