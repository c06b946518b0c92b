"""Changes to typer and click: the help, what is known of a call for its error, and a faster start."""

from __future__ import annotations

import copy
import os
from typing import Any, get_args

import typer
import typer.main

from ckptconv.later import dataclass

# The class of typer's errors about a command line, which has no public name.
WRONG_USAGE: type[Any] = typer.BadParameter.__bases__[0]


class _Words:
    """Takes words of the command line, and defaults, as they are.

    typer has pydantic check each value, and the import of pydantic takes as long as all else before a conversion
    begins. Here only words that are not a valid choice go to pydantic, for its error message.
    """

    def __init__(self, parameter: Any) -> None:
        self._checked = parameter.get_runtime_param

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        kind = param.type_descriptor.annotation
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if kind in (str, list[str]) or value in get_args(kind):
            return value
        return self._checked().coerce(value, param=param, ctx=ctx)


class App(typer.Typer):
    """A program that makes only the command that it is called with: to make all of them takes 20 ms. Where all are
    listed, the others are made without their options."""

    def __call__(self, arguments: list[str], **settings: Any) -> Any:
        completed = _completed()
        named = (arguments if completed is None else completed)[:1]
        one = copy.copy(self)
        one.registered_commands = [each for each in self.registered_commands if each.name in named]
        one.registered_groups = [each for each in self.registered_groups if each.name in named]
        is_known = one.registered_commands or one.registered_groups
        if completed is not None or named in _LISTING:
            one.registered_commands = [
                each if each.name in named else _without_options(each) for each in self.registered_commands
            ]
            one.registered_groups = self.registered_groups
        elif not is_known:
            one = self
        return typer.main.get_command(one)(arguments, **settings)


# What asks for a list of the commands, or needs none of them.
_LISTING = (["-h"], ["--help"], ["--version"])


def _completed() -> list[str] | None:
    """Return the words that a shell asks to complete, after the program's name; None if none does."""
    if "_CKPTCONV_COMPLETE" not in os.environ:
        return None
    return os.environ.get("_TYPER_COMPLETE_ARGS", os.environ.get("COMP_WORDS", "")).split()[1:]


def _without_options(info: Any) -> Any:
    """Return a command that takes nothing, with the name and the help of another."""

    def command() -> None:
        raise AssertionError(f"{info.name} was called without its options")

    command.__doc__ = info.callback.__doc__
    bare = copy.copy(info)
    bare.callback = command
    return bare


@dataclass
class Call:
    """What is known of a call of the program, for the report of a failure: the command, and its first argument."""

    command: str | None = None
    input: str | None = None

    def note(self, path: str, command: Any, args: list[str]) -> None:
        """Take the command that `path` names, and its input from `args`, the words after its name."""
        if not hasattr(command, "commands"):
            self.command = path.partition(" ")[2]
            self.input = _first_argument(command.params, args)


def _first_argument(parameters: list[Any], args: list[str]) -> str | None:
    """Return the first of `args` that is no option's; None if there is none, or an unknown option hides which it is."""
    options = {name: each for each in parameters for name in (*each.opts, *each.secondary_opts)}
    words = iter(args)
    for word in words:
        if word == "--":
            return next(words, None)
        if word == "-" or not word.startswith("-"):
            return word
        name, equals, _ = word.partition("=")
        option = options.get(name.replace("_", "-"))
        if option is None:
            return None
        if not option.is_flag and not equals:
            next(words, None)
    return None


class _Quick:
    """A command that starts faster where typer works as when this was written (0.29), and is like any other
    elsewhere."""

    _is_brief = False

    def get_help(self, ctx: Any) -> str:
        """Return the help: short if -h asks for it."""
        from ckptconv.cli.help import help_of, shown

        text = shown(help_of(self, ctx.command_path, self.get_params(ctx)), brief=self._is_brief)  # type: ignore[attr-defined]
        ctx.color = True  # colours are in the text already, where they belong
        return text

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return what the command does, whole: shells show it beside its name."""
        from ckptconv.cli.help import summary_of

        return summary_of(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._is_brief = "-h" in args and "--help" not in args
        if isinstance(ctx.obj, Call):
            ctx.obj.note(ctx.command_path, self, args)
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            is_known = hasattr(parameter, "get_runtime_param") and hasattr(parameter, "type_descriptor")
            if is_known and "get_runtime_param" not in vars(parameter):  # a command may parse more than once
                words = _Words(parameter)
                parameter.get_runtime_param = lambda words=words: words
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except WRONG_USAGE as error:
            # If an option lacks its value, the parser does not say which command it belongs to.
            error.ctx = error.ctx or ctx
            raise


class Command(_Quick, typer.core.TyperCommand):
    pass


class Group(_Quick, typer.core.TyperGroup):
    pass
