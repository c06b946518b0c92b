"""Run a command and end the process: exit codes, and standard streams that were closed."""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn

from ckptconv.cli import signals
from ckptconv.cli.commands import app
from ckptconv.cli.options import output_of
from ckptconv.cli.typer_compat import Call
from ckptconv.errors import CkptconvError, StoppedError, UsageError


def _mend_streams() -> None:
    """Make the standard streams take anything: discard output to a closed one, escape what an encoding lacks."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    call = Call()
    try:
        try:
            signals.raise_stopped()
            _mend_streams()
            code = _run(arguments, call)
        finally:
            signals.ignore()
    except StoppedError as error:  # it came outside the command: before, after, or while another error was handled
        signals.ignore()
        _report(error, arguments, call)
        code = error.exit_code
    sys.exit(code)


def _report(error: CkptconvError, arguments: list[str], call: Call) -> None:
    output_of(call.command or "", {"json": "--json" in arguments}).failed(error, call.input)


def _run(arguments: list[str], call: Call) -> int:
    """Run a command and return its exit code. Every error becomes one paragraph."""
    if not arguments:
        app(["-h"], standalone_mode=False, prog_name="ckptconv")
        return UsageError.exit_code
    if arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    if any("://" in argument for argument in arguments):
        from ckptconv.process import spare_memory

        spare_memory()
    try:
        code = app(arguments, standalone_mode=False, prog_name="ckptconv", obj=call)
        sys.stdout.flush()
    except BaseException as error:
        from ckptconv.cli.failures import failure_of

        failure = failure_of(error)
        if failure is None:
            raise
        signals.ignore()  # the code is known
        _report(failure, arguments, call)
        return failure.exit_code
    return code if isinstance(code, int) else 0
