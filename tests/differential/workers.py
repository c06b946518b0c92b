"""The readers as those see them who ask: started together, asked for a file, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent.parent


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
        environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [
                sys.executable, "-W", "ignore", "-m", "differential.readers",
                *(f"{end.fileno()}={name}" for name, end in inner.items()),
            ],
            pass_fds=[end.fileno() for end in inner.values()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
        )  # fmt: skip
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
        self._process.wait()
        self._said.close()
