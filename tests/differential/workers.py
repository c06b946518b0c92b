"""The readers as those see them who ask: started together, asked for a file, stopped."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from differential import readers


class Workers:
    """Some readers, each in a process of its own."""

    def __init__(self, names: Iterable[str]) -> None:
        self._files: dict[str, Any] = {}
        inner: dict[str, socket.socket] = {}
        for name in names:
            outer, inner[name] = socket.socketpair()
            self._files[name] = outer.makefile("rwb")
            outer.close()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the workers)
        # A fork, as whoever asks may have torch imported already.
        self._process = os.fork()
        if not self._process:
            _begin({end.fileno(): name for name, end in inner.items()}, self._said.fileno())
        for end in inner.values():
            end.close()

    def ask(self, names: Iterable[str], path: Path) -> dict[str, dict[str, Any]]:
        """What each of these readers makes of a file; they work at the same time."""
        names = list(names)
        for name in names:
            with contextlib.suppress(BrokenPipeError):
                self._files[name].write(json.dumps(str(path)).encode() + b"\n")
                self._files[name].flush()
        answers = {}
        for name in names:
            line = self._files[name].readline()
            if not line:
                raise RuntimeError(f"the reader {name!r} has gone: {self._last_words()}")
            answers[name] = json.loads(line)
        return answers

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read().decode("utf-8", "replace")[-1000:]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()
        os.waitpid(self._process, 0)
        self._said.close()


def _begin(ends: dict[int, str], said: int) -> NoReturn:
    """Be the readers, each of which answers at one of `ends`, with nothing else open but `said` for what goes wrong."""
    try:
        faulthandler.disable()  # pytest's, which would write to a file that is closed here
        os.dup2(said, 2)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        for before, end in pairwise([2, *sorted(ends), 1 << 16]):
            os.closerange(before + 1, end)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        warnings.simplefilter("ignore")
        readers.main(ends)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
