"""Produce an output for a command with a function of the library, and report it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptconv.cli import signals
from ckptconv.cli.options import run
from ckptconv.errors import CorruptError, MissingError, UsageError
from ckptconv.options.registered import EXECUTORS, advise, names_of
from ckptconv.options.table import COMMAND, OPTIONS
from ckptconv.process import of_feature

if TYPE_CHECKING:
    from ckptconv.result import Report


def convert_one(command: str, family: str, source: str, target: str | None, options: dict[str, Any]) -> None:
    """Convert one input, of any family if `family` is empty, and report it."""
    from ckptconv.conversion import convert

    try:
        make(command, convert, source, target, {"family": family, **options})
    except MissingError as error:
        from ckptconv.cli.failures import meant_by_input

        error.hint = meant_by_input(source, target, error.hint)
        raise
    except (CorruptError, UsageError) as error:
        advise(error, source, options)
        raise


def make(command: str, call: Callable[..., Report], source: Any, target: str | None, options: dict[str, Any]) -> None:
    """Convert `source` to `target` by `call`, a function of the library, and report it."""
    workers = {name: value for name in names_of(*EXECUTORS) if (value := options.pop(name, ""))}
    ways = [*(OPTIONS[name] for name in ("part",) if options.get(name)), *(COMMAND[name] for name in workers)]
    if len(ways) > 1:
        first, second = (way.flags[0] for way in ways[:2])
        raise UsageError(f"{first} and {second} both distribute the work: use only one of them.")
    with contextlib.ExitStack() as stack:
        executor = None
        for name, value in workers.items():
            module = of_feature(names_of(*EXECUTORS)[name], "executor")
            executor = stack.enter_context(module.executor(value))
        output, report = run(command, options, call, source, target, before_commit=signals.ignore, executor=executor)
    output.done(report)
