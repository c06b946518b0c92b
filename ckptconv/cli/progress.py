"""Progress of the work on stderr: a bar on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ckptconv.cells import cut
from ckptconv.cli.console import Printer, say
from ckptconv.cli.lines import format_time
from ckptconv.cli.terminal import can_rewrite
from ckptconv.text import format_size, printable

if TYPE_CHECKING:
    from tqdm import tqdm
    from typing_extensions import Self

# Seconds between two lines of progress if there is no terminal.
INTERVAL = 5.0
# Cells of a file's name in front of a bar, and the narrowest terminal on which it has one.
SHORT, WIDE_ENOUGH = 24, 72


class Counting:
    """Counts bytes written, from any thread. Shows nothing itself."""

    def __init__(self) -> None:
        self.total = self.done = 0
        self.current = ""
        self.started = time.monotonic()
        self._lock = threading.Lock()

    def begin(self, total: int) -> None:
        """Start or restart with `total` bytes to write."""
        self.total, self.done = total, 0
        self.started = time.monotonic()

    def resize(self, total: int) -> None:
        """Change the number of bytes to write to `total`."""
        self.total = total

    def __call__(self, count: int) -> None:
        with self._lock:
            self.done += count
            self.show(count)

    def on_file(self, name: str) -> None:
        """Note that the output file `name` is begun."""
        self.current = printable(name.removesuffix(".safetensors"))

    def show(self, count: int) -> None:
        """Show that `count` more bytes are done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""


class Lines(Counting):
    """Prints a plain line every few seconds, for logs."""

    def begin(self, total: int) -> None:
        super().begin(total)
        self._next = self.started + INTERVAL

    def show(self, count: int) -> None:
        now = time.monotonic()
        if now < self._next or not self.done:
            return
        self._next = now + INTERVAL
        rate = self.done / (now - self.started)
        left = (self.total - self.done) / rate
        say(
            f"{self.done / self.total:.0%}, {format_size(self.done)} of {format_size(self.total)} "
            f"at {format_size(rate)}/s, {format_time(left)} left, {self.current}".removesuffix(", ")
        )


class OneBar(Counting):
    """One bar with bytes, rate and the time left."""

    _bar: tqdm[Any] | None = None

    def begin(self, total: int) -> None:
        from tqdm import tqdm

        super().begin(total)
        if self._bar is not None:
            self._bar.close()
        tqdm.monitor_interval = 0  # no thread that watches over it
        self._bar = tqdm(total=self.total, unit="B", unit_scale=True, leave=False, file=sys.stderr, dynamic_ncols=True)

    def resize(self, total: int) -> None:
        super().resize(total)
        if self._bar is not None:
            self._bar.total = total

    def on_file(self, name: str) -> None:
        super().on_file(name)
        if self._bar is not None:
            with contextlib.suppress(OSError):
                is_wide = os.get_terminal_size(sys.stderr.fileno()).columns >= WIDE_ENOUGH
                self._bar.set_description_str(cut(self.current, SHORT) if is_wide else "")

    def show(self, count: int) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.update(count)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


def shown_by(printer: Printer) -> Counting:
    """Return a bar on a terminal, plain lines elsewhere, or a silent counter if `printer` shows no progress."""
    if not printer.progress_shown:
        return Counting()
    return OneBar() if can_rewrite(sys.stderr) else Lines()
