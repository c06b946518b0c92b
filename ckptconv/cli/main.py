"""Run a command and end the process: exit codes, and standard streams that were closed."""

from __future__ import annotations

import contextlib
import io
import os
import sys

from ckptconv.cli import signals
from ckptconv.cli.call import Call
from ckptconv.errors import CkptconvError, StoppedError, UsageError

TYPE_CHECKING = False  # typing takes longer to import than everything that help needs
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn


# Room for what the report of an error imports where memory ran out; zeros that nothing writes to take no memory.
_room = [bytes(4 << 20)]


def _mend_streams() -> None:
    """Make the standard streams accept any text: discard output if closed, and escape unencodable characters."""
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
    call = Call(is_process=arguments is None)
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    _mend_streams()
    answer = _text_only(arguments)
    if answer is None:  # while a signal still ends the process at once
        import ckptconv.cli.commands  # noqa: F401
    try:
        try:
            signals.raise_stopped()
            code = _run(arguments, call, answer)
        finally:
            signals.ignore()
    except StoppedError as error:  # it came outside the command: before, after, or while another error was handled
        signals.ignore()
        _report(error, arguments, call)
        code = error.exit_code
    sys.exit(code)


def _text_only(arguments: list[str]) -> tuple[str, int] | None:
    """Return the text to print and the exit code, if only text is requested: the version, help, or completions of a
    command line. This imports nothing that only commands need. None: a command is called."""
    if "_CKPTCONV_COMPLETE" in os.environ:
        from importlib import import_module

        from ckptconv.cli.registered import COMPLETING

        return next((import_module(module).answered(os.environ) for module in COMPLETING), None)
    if arguments == ["--version"]:
        from ckptconv.cli.versions import versions

        return "".join(f"{version}\n" for version in versions()), 0
    if not arguments or arguments[-1] in ("-h", "--help"):
        from ckptconv.cli.help import help_for

        text = help_for(arguments)
        return (text, 0 if arguments else UsageError.exit_code) if text else None
    return None


def _report(error: CkptconvError, arguments: list[str], call: Call) -> None:
    from ckptconv.cli.failures import report
    from ckptconv.cli.options import output_of

    report(output_of(call.command or "", {"json": "--json" in arguments}), error, call.input)


def _run(arguments: list[str], call: Call, answer: tuple[str, int] | None) -> int:
    """Print the `answer`, or run a command, and return the exit code. Every error becomes one paragraph."""
    try:
        if answer is not None:
            text, code = answer
            print(text, end="")
        else:
            code = _called(arguments, call)
        sys.stdout.flush()
    except BaseException as error:
        _room.clear()
        from ckptconv.cli.failures import failure_of

        failure = failure_of(error)
        if failure is None:
            raise
        signals.ignore()  # the code is known
        _report(failure, arguments, call)
        return failure.exit_code
    return code


def _called(arguments: list[str], call: Call) -> int:
    from ckptconv.cli.commands import app

    if any("://" in argument for argument in arguments):
        from ckptconv.process import spare_memory

        spare_memory()
        if call.is_process and (url := next((word for word in arguments if "memory://" in word), "")):
            lost = "A memory:// URL refers to the memory of this process, which is lost when the command ends."
            raise UsageError(f"{url}: {lost}", "Give a path on a disk or a store, or call the library in Python.")
    with _option_warnings_reported(is_quiet=not {"-q", "--quiet"}.isdisjoint(arguments)):
        code = app(arguments, standalone_mode=False, prog_name="ckptconv", obj=call)
    return code if isinstance(code, int) else 0


@contextlib.contextmanager
def _option_warnings_reported(is_quiet: bool) -> Iterator[None]:
    """Report on stderr, once each, warnings about the way in which options were given."""
    import warnings

    from ckptconv.cli.console import say
    from ckptconv.options.kinds import OptionWarning

    reported: set[str] = set()
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, OptionWarning):
                others(message, category, *where, **more)
            elif not is_quiet and str(message) not in reported:
                reported.add(str(message))
                say(str(message))

        warnings.simplefilter("always", OptionWarning)
        warnings.showwarning = show
        yield
