"""Changes to typer and click: the help, the record of a call for its error, and a faster start."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import typer
import typer.main

from ckptconv.cli.call import Call
from ckptconv.errors import UsageError

# The class of typer's errors about a command line, which has no public name.
WRONG_USAGE: type[Any] = typer.BadParameter.__bases__[0]


class _Words:
    """Accepts words of the command line, and defaults, unchanged.

    typer lets pydantic check each value, and importing pydantic takes as long as all other work before a
    conversion begins. Options parse and check their words themselves.
    """

    def __init__(self, parameter: Any) -> None:
        self._checked = parameter.get_runtime_param

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        kind = param.type_descriptor.annotation
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if kind in (str, list[str]):
            return value
        return self._checked().coerce(value, param=param, ctx=ctx)


def _check_given(given: Sequence[Any], args: Sequence[str], flags: set[str]) -> None:
    """Raise UsageError if one of the parameters `given` by `args` takes one value and is given more than once, or has
    one of `flags`, the names of options, instead of its value."""
    for option in given:
        if option.param_type_name != "option" or option.is_flag or option.count:
            continue
        flag, times = option.opts[0], given.count(option)
        for word in flags.intersection(word for name, word in itertools.pairwise(args) if name in option.opts):
            needed = f"{flag} needs {option.metavar or 'a value'}, but {word} is an option."
            raise UsageError(needed, f"If {word} is the value, give {flag}={word}.")
        if times > 1 and not option.multiple:
            hint = "For several, use --key . with --include 'KEY.*' for each." if flag == "--key" else "Give it once."
            hint = "Give one prefix, or repeat --rename '^PREFIX='." if flag == "--strip-prefix" else hint
            raise UsageError(f"{flag} is given {times} times, but takes one value.", hint)


class App(typer.Typer):
    """A program that imports only the command that it is called with: all of them take 20 ms.

    `commands` are its commands, or groups of them: {name: "module:name"}.
    """

    def __init__(self, commands: Mapping[str, str], **settings: Any) -> None:
        super().__init__(**settings)
        self._commands = commands

    def __call__(self, arguments: list[str], **settings: Any) -> Any:
        try:
            return self.made(*arguments)(arguments, **settings)
        except WRONG_USAGE:  # whose report is about all options of the command
            return self.made(*arguments[:1])(arguments, **settings)

    def made(self, name: str = "", *words: str) -> Any:
        """Return the program with the command `name`, or with all commands if that is unknown. With `words` after it,
        the command has only the options that these need; else all of its options."""
        program = copy.copy(self)
        program.registered_commands, program.registered_groups = [], []
        places = {name: self._commands[name]} if name in self._commands else self._commands
        for called, place in places.items():
            module_name, _, attribute = place.partition(":")
            module = import_module(module_name)
            command = getattr(module, attribute)
            if isinstance(command, typer.Typer):
                program.add_typer(command, name=called)
            else:
                program.command(called, cls=Command)(command.of(words) if words else command)
        return typer.main.get_command(program)


class _Quick:
    """A command that starts faster with typer 0.29, and like any other command with versions that work differently."""

    _is_brief = False

    def get_help(self, ctx: Any) -> str:
        """Return the help: short if -h asks for it."""
        from ckptconv.cli.help import BRIEF, LONG, help_for

        text = help_for([*ctx.command_path.split()[1:], BRIEF if self._is_brief else LONG])
        ctx.color = True  # colours are in the text already, where they belong
        return (text or "").rstrip("\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._is_brief = "-h" in args and "--help" not in args
        if isinstance(ctx.obj, Call):
            ctx.obj.note(ctx.command_path, self, args)
        flags: set[str] = set()
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            flags.update(name for name in (*parameter.opts, *parameter.secondary_opts) if name[0] == "-")
            is_known = hasattr(parameter, "get_runtime_param") and hasattr(parameter, "type_descriptor")
            if is_known and "get_runtime_param" not in vars(parameter):  # a command may parse more than once
                words = _Words(parameter)
                parameter.get_runtime_param = lambda words=words: words
        try:
            _check_given(self.make_parser(ctx).parse_args(list(args))[2], args, flags)  # type: ignore[attr-defined]
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except WRONG_USAGE as error:
            # If an option lacks its value, the parser does not say which command it belongs to.
            error.ctx = error.ctx or ctx
            raise


class Command(_Quick, typer.core.TyperCommand):
    pass


class Group(_Quick, typer.core.TyperGroup):
    pass
