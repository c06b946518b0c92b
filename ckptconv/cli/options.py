"""The options of the commands for typer, from the table of options."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.errors import UNWRITTEN, UsageError, leaving
from ckptconv.options.kinds import FLAG
from ckptconv.options.option import FeatureOption, Option, former_given
from ckptconv.options.registered import EXECUTORS, names_of, several
from ckptconv.options.table import COMBINING, COMMAND, OPTIONS, TENSORS, named_in
from ckptconv.text import LastWord

if TYPE_CHECKING:
    from ckptconv.cli.console import Printer

Input = Annotated[
    str, typer.Argument(metavar="INPUT", show_default=False, help="A file, a sharded set or its index; - reads a pipe.")
]
Destination = Annotated[
    str | None,
    typer.Argument(metavar="OUTPUT", show_default=False, help="A name that ends in .safetensors, or a directory."),
]


def named(names: str) -> list[Option]:
    """Return the options with these names, without those of features that are not installed."""
    return list(named_in(names, {**COMMAND, **OPTIONS}).values())


SHOWING = named("json quiet verbose storage_options inert progress")
CONVERTING = [
    *TENSORS,
    *named("copy_config jobs memory fsync clobber overwrite verify checksum spool_dir part"),
    *(COMMAND[name] for name in names_of(*EXECUTORS)),
    *named("manifest digest attest depfile dry_run"),
    *SHOWING,
]
# Those of commands that compute one output from several checkpoints.
CONVERTING_SEVERAL = [option for option in CONVERTING if option.name in COMBINING or option.name not in OPTIONS]


def taking(*options: Option) -> Callable[[Callable[..., None]], _Taking]:
    """Decorate a command: add `options` after its arguments, and pass it by name the values that were given, on the
    command line or by environment variables."""
    return lambda function: _Taking(function, options)


class _Taking:
    """A command that takes more options than its function names. Its parameters are created when typer asks for them,
    because only one command is called."""

    def __init__(self, function: Callable[..., None], options: Sequence[Option]) -> None:
        self._function = function
        self.options = {option.name: option for option in options}
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def of(self, words: Sequence[str]) -> _Taking:
        """Return the command with only those options of features that `words` of a command line name: no feature is
        imported for the others."""
        flags = {word.partition("=")[0].replace("_", "-") for word in words}
        taken = (
            option
            for option in self.options.values()
            if not isinstance(option, FeatureOption) or flags.intersection(re.split("[ /]+", " ".join(option.flags)))
        )
        return _Taking(self._function, tuple(taken))

    def __call__(self, **keywords: Any) -> None:
        words = {option: keywords.pop(name) for name, option in self.options.items()}
        for option in self._formers:
            word = keywords.pop(_former(option))
            if word in (None, (), False):
                continue
            if words[option] not in (None, (), False):
                raise UsageError(f"{option.former} and {option.flags[0]} are the same option: give only one of them.")
            former_given(option.former, option)
            words[option] = word
        values = {
            option.name: option.of_words(word)
            for option, word in words.items()
            if word not in (None, ()) and (word or option.kind is not FLAG)
        }
        others = {name: option for name, option in self.options.items() if name not in values}
        from_environment = {
            name: value for name, option in others.items() if (value := option.of_environment()) is not None
        }
        try:
            self._function(**keywords, **values, **from_environment)
        except UsageError as error:
            if not from_environment:
                raise
            raise _about_variables(error, [others[name] for name in from_environment]) from error

    @functools.cached_property
    def _own(self) -> list[inspect.Parameter]:
        parameters = inspect.signature(self._function, eval_str=True).parameters.values()
        return [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]

    @property
    def _formers(self) -> list[Option]:
        """The options that are also accepted under a former name."""
        return [option for option in self.options.values() if option.former]

    @property
    def arguments(self) -> dict[str, str]:
        """The help of each argument, by its name."""
        return {parameter.name: _about(parameter) for parameter in self._own if not isinstance(parameter.default, bool)}

    @functools.cached_property
    def __signature__(self) -> inspect.Signature:
        return inspect.Signature(
            [*self._own, *map(_parameter, self.options.values()), *map(_former_parameter, self._formers)]
        )

    # Before Python 3.11, `get_type_hints`, which typer calls, changes the annotation of a parameter whose default is
    # None, where it finds the default: this has none.
    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: parameter.annotation for name, parameter in self.__signature__.parameters.items()}


def _about(argument: inspect.Parameter) -> str:
    """Return the help of an argument; older typer loses it with newer click."""
    return next((metadata.help or "" for metadata in getattr(argument.annotation, "__metadata__", ())), "")


def _about_variables(error: UsageError, options: list[Option]) -> UsageError:
    """Return `error`, with the names of `options` replaced by those of their environment variables."""
    message = error.message
    for option in options:
        message = re.sub(rf"{option.flags[0]}(?![\w-])", option.env, message)
    return UsageError(message, error.hint)


@functools.cache
def _parameter(option: Option) -> inspect.Parameter:
    """Return `option` as a parameter of a function that typer makes a command from."""
    words, default = (bool, False) if option.kind is FLAG else (option.kind.words | None, None)
    taken = typer.Option(*option.flags, metavar=option.metavar, help=option.about)
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[words, taken]
    )


def _former(option: Option) -> str:
    """Return the name of the parameter for the former name of an option."""
    return f"former_{option.name}"


def _former_parameter(option: Option) -> inspect.Parameter:
    """Return the parameter for the former name of an option, which no help shows."""
    words = bool if option.kind is FLAG else option.kind.words | None
    taken = typer.Option(option.former, hidden=True)
    return _parameter(option).replace(name=_former(option), annotation=Annotated[words, taken])


@leaving(UNWRITTEN)
def destination(argument: str | None, options: dict[str, Any]) -> str | None:
    """Return OUTPUT: the `argument`, or the value of -o, which is removed from `options`. Raise UsageError for both."""
    named: str | None = options.pop("into", None)
    if named is not None and argument is not None:
        other = os.path.exists(argument) and several("If the first is another input: {}. If not, leave one out.")
        raise UsageError(f"OUTPUT is given twice: {argument}, and {named} with -o.", other or "Leave one out.")
    return argument if named is None else named


@leaving(UNWRITTEN)
def required(argument: str | None, options: dict[str, Any], such: str = "") -> str:
    """Return OUTPUT likewise. Without it, raise UsageError with the example `such`."""
    output = destination(argument, options)
    if output is None:
        raise UsageError("OUTPUT is missing.", f"Give it as the second argument, or with -o{such}.")
    return output


@leaving(UNWRITTEN)
def divided(words: list[str], options: dict[str, Any], needs: str, inputs: int = 1) -> tuple[list[str], str]:
    """Return the inputs, and OUTPUT: the value of -o, which is removed from `options`, or else the last of `words`.

    Raise UsageError, which says what the command `needs`, if there are fewer `inputs`.
    """
    output: str | None = options.pop("into", None)
    if output is None and words:
        # The shell may have put one more input there.
        *words, last = words
        output = LastWord(last, "Give OUTPUT with -o.")
    if output is None or len(words) < inputs:
        raise UsageError(needs)
    return words, output


def run(
    command: str, options: dict[str, Any], call: Callable[..., Any], *arguments: Any, **more: Any
) -> tuple[Printer, Any]:
    """Carry out a `command`: show the progress of `call`, a function of the library, and let no signal stop the report
    after it. Return the printer of its report, and the result."""
    output = output_of(command, options)
    with contextlib.ExitStack() as stack:
        if output.progress_shown:
            from ckptconv.cli.progress import shown_by

            progress = stack.enter_context(shown_by(output))
            more |= {"progress": progress, "on_total": progress.begin}
        result = call(*arguments, **more, **options)
    signals.ignore()
    return output, result


def output_of(command: str, options: dict[str, Any]) -> Printer:
    """Return the printer of `command`. Remove the options that configure it from `options`."""
    from ckptconv.cli.console import Printer  # not needed for --help

    shown = {name: options.pop(name) for name in ("json", "quiet", "verbose") if name in options}
    is_watched = options.pop("progress", True) and not shown.get("quiet")
    return Printer(command, progress_shown=is_watched, **shown)
