"""Steps that wait for the disk, in a thread of their own."""

from __future__ import annotations

import signal
import threading
from typing import Any, NoReturn

import pytest

from ckptconv.storage.writing import Syncing


def test_steps_run_one_after_the_other() -> None:
    done: list[int] = []
    with Syncing() as syncing:
        for number in range(9):
            syncing.add(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == [*range(9)]


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
