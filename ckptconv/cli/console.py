"""The printing of commands: reports on stdout; progress, warnings and errors on stderr; one JSON object with --json."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from ckptconv.errors import FailedError
from ckptconv.storage import stores
from ckptconv.text import printable, reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptconv.cli.lines import Line
    from ckptconv.result import Report

# The version of all schemas in `schemas`: it changes when a field changes its meaning, or goes.
VERSION = 1


@dataclasses.dataclass(eq=False, repr=False)
class Printer:
    """Prints a command's report: as lines or as JSON, unless quiet."""

    command: str = ""
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    progress_shown: bool = True

    def __post_init__(self) -> None:
        stores.on_wait = self.note

    def note(self, text: str) -> None:
        """Print a note, unless quiet."""
        if not self.quiet:
            say(text)

    def warn(self, text: str) -> None:
        say(f"warning: {text}")

    def report(self, result: Any, lines: Iterable[str]) -> None:
        """Print the report of a command: as JSON its `result`, a dataclass, else `lines`, unless quiet."""
        for warning in result.warnings:
            self.warn(warning)
        if self.json:
            self.print_json(True, dataclasses.asdict(result))
        else:
            self.tell(lines)

    def done(self, report: Report) -> None:
        """Report the end of a conversion. If that fails it only warns, because the outputs are complete."""
        lines: list[str] = []
        if not self.quiet and not self.json:
            from ckptconv.cli.reports import of_conversion

            lines = of_conversion(report, self.verbose)
        try:
            self.report(report, lines)
        except FailedError as error:
            self.warn(str(error))

    def tell(self, lines: Iterable[str]) -> None:
        """Print lines, unless quiet."""
        if not self.quiet:
            self._print(lines)

    def show(self, lines: Iterable[Line]) -> None:
        """Print styled lines, unless quiet."""
        if not self.quiet:
            from ckptconv.cli.terminal import styled  # of overviews, not of conversions

            self._write(styled(lines))

    def print_json(self, ok: bool, fields: Mapping[str, Any]) -> None:
        """Print one object with the members that all have. Raises FailedError if that fails."""
        value = {"version": VERSION, "ok": ok, "command": self.command or None, **fields}
        # A lone surrogate in a name must not keep the report from being printed.
        self._print([json.dumps(value, ensure_ascii=True, allow_nan=False, default=_plain)])

    def _print(self, lines: Iterable[str]) -> None:
        self._write("".join(f"{printable(line)}\n" for line in lines))

    def _write(self, text: str) -> None:
        """Write to stdout. Raises FailedError if that fails, but not if the reader has closed the pipe."""
        try:
            print(text, end="", flush=True)
        except OSError as error:
            # Python would try again when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):
                raise FailedError(f"The report could not be written: {reason(error)}.") from error


def _plain(value: Any) -> Any:
    """Return a value without a JSON type as one with a JSON type."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)


def say(text: str, by: str = "ckptconv: ") -> None:
    """Print a line to stderr. The work goes on if stderr is closed."""
    with contextlib.suppress(OSError):
        print(f"{by}{printable(text)}", file=sys.stderr, flush=True)
