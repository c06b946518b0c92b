"""Changes to typer and click: the words of errors and help, and a faster start."""

from __future__ import annotations

from typing import Any, get_args

import typer

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


class _Quick:
    """A command that starts faster where typer works as when this was written (0.29), and is like any other
    elsewhere."""

    def get_help(self, ctx: Any) -> str:
        """Return the help, in which arguments have their names alone, without braces and types."""
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            if hasattr(parameter, "_usage_display_name") and parameter.metavar:
                name = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
                parameter._usage_display_name = lambda name=name: name
                parameter.display_type_rich = lambda ctx: ""
        return super().get_help(ctx)  # type: ignore[misc, no-any-return]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            if hasattr(parameter, "get_runtime_param") and hasattr(parameter, "type_descriptor"):
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
