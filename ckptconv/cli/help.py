"""The help of a command, as data and as text. The reference and the man pages are made of the same data."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.cli.terminal import coloured, has_colours
from ckptconv.later import dataclass
from ckptconv.options.kinds import FLAG
from ckptconv.options.table import GROUPS, REPORTING, Option

# Widest text, and widest column of options beside their help.
WIDTH, COLUMN = 80, 30
_OWN = "Options"  # the heading of options that no command shares
_BRIEF = "-h"
_HELD = "\xa0"  # a blank at which no line ends


class Flag(NamedTuple):
    """An option in the help: its names, what stands after them, its help, its default in words, its environment
    variable. `group` is its heading; `common`: the short help has it."""

    names: tuple[str, ...]
    metavar: str
    about: str
    group: str
    default: str = ""
    env: str = ""
    common: bool = False

    @property
    def words(self) -> str:
        """The option as it is typed, short name first: -t, --tag TAG."""
        return f"{', '.join(sorted(self.names, key=len))} {self.metavar}".rstrip()

    @property
    def text(self) -> str:
        """Its help, with the default and the variable."""
        told = [self.about]
        told += [f"[default: {self.default}]"] if self.default else []
        told += [f"[env:{_HELD}{self.env}]"] if self.env else []
        return " ".join(told)


@dataclass(frozen=True)
class Help:
    """What the help of a command says. `commands` maps the commands of a group to their summaries."""

    path: str
    usage: str
    summary: str
    paragraphs: list[str]
    examples: list[str]
    arguments: dict[str, str]
    flags: list[Flag]
    commands: dict[str, str]

    def groups(self) -> Iterator[tuple[str, list[Flag]]]:
        """Yield each heading with its options, in order."""
        for heading in (_OWN, *GROUPS):
            flags = [flag for flag in self.flags if flag.group == heading]
            if flags:
                yield heading, flags


def help_of(command: Any, path: str, parameters: Iterable[Any]) -> Help:
    """Return the help of a command of typer's, which has these parameters and is called by `path`."""
    commands: dict[str, Any] = getattr(command, "commands", {})
    parameters = list(parameters)
    known: Mapping[str, Option] = getattr(command.callback, "options", {})
    about: Mapping[str, str] = getattr(command.callback, "arguments", {})
    arguments = {each.metavar: (each, about[each.name]) for each in parameters if each.param_type_name == "argument"}
    names = [name if each.required else f"[{name}]" for name, (each, _) in arguments.items()]
    paragraphs, examples = _told(command.help)
    name = path.partition(" ")[2]
    return Help(
        path=path,
        usage=" ".join([path, "[OPTIONS]", *names, *(["COMMAND …"] if commands else [])]),
        summary=paragraphs[0],
        paragraphs=paragraphs[1:],
        examples=examples,
        arguments={name: about for name, (_, about) in arguments.items()},
        flags=[
            _flag(each, known, name, REPORTING if known else _OWN)
            for each in parameters
            if each.param_type_name == "option" and not each.hidden
        ],
        commands={name: summary_of(each) for name, each in commands.items()},
    )


def _told(text: str) -> tuple[list[str], list[str]]:
    """Return the paragraphs of a command's docstring, and the lines of its examples."""
    before, _, after = text.partition("\b\nExamples:\n")
    examples, _, more = after.partition("\n\n")
    lines = textwrap.dedent(examples).splitlines()
    return [" ".join(each.split()) for each in f"{before}\n\n{more}".split("\n\n") if each.strip()], lines


def summary_of(command: Any) -> str:
    """Return the first sentence of a command's help."""
    return re.split(r"(?<=[.?])\s", _told(command.help)[0][0])[0]


def _flag(parameter: Any, known: Mapping[str, Option], command: str, others: str) -> Flag:
    option = known.get(parameter.name)
    names = (*parameter.opts, *parameter.secondary_opts)
    if option is None:
        if _BRIEF in names:
            return Flag(names, "", f"Show all options; {_BRIEF} shows the most used.", others)
        return Flag(names, "", parameter.help or "", others)
    return Flag(
        names,
        option.metavar or "",
        option.about,
        option.group,
        option.default_of(command),
        f"{option.env}=0" if option.env and option.kind is FLAG else option.env,
        option.common is True or command in str(option.common).split(),
    )


# ---------------------------------------------------------------------------------------------------------------- text


def shown(told: Help, brief: bool = False) -> str:
    """Return the help as it is printed: in colours where stdout has them. `brief`: the most used options only."""
    width = min(shutil.get_terminal_size().columns, WIDTH)
    text = "\n".join(_lines(told, brief, max(width, 40)))
    if not has_colours(sys.stdout):
        return text
    from rich.text import Text

    console = coloured(sys.stdout)
    styled = Text(text)
    styled.highlight_regex(r"(?m)^\S.*?:", "bold")
    styled.highlight_regex(r"(?m)^  -\S+(, --\S+)?", "cyan")
    with console.capture() as capture:
        console.print(styled, end="")
    return capture.get()


def _lines(told: Help, brief: bool, width: int) -> Iterator[str]:
    yield from textwrap.wrap(f"Usage: {told.usage}", width, subsequent_indent="  ")
    yield ""
    for paragraph in (told.summary, *([] if brief else told.paragraphs)):
        yield from _wrapped(paragraph, "  ", width)
        yield ""
    if brief and not told.commands:
        flags = [flag for flag in told.flags if flag.common]
        yield from _listed({flag.words: flag.text for flag in flags}, width)
        yield ""
    else:
        sections = {"Commands": told.commands, "Arguments": told.arguments}
        for heading, entries in sections.items():
            if entries:
                yield from (f"{heading}:", *_listed(entries, width), "")
        for heading, group in told.groups() if not brief else ():
            yield from (f"{heading}:", *_listed({flag.words: flag.text for flag in group}, width), "")
    examples = told.examples[:1] if brief else told.examples
    yield f"Example{'' if len(examples) == 1 else 's'}:"
    yield from (f"  {each}" for each in examples)
    if brief:
        yield from ("", "--help for all." if told.commands else f"--help for all {len(told.flags)} options.")


def _listed(entries: Mapping[str, str], width: int) -> Iterator[str]:
    """Yield terms, with what they mean beside them, or below a term that is too long."""
    column = min(max((len(term) for term in entries), default=0) + 4, COLUMN)
    for term, meaning in entries.items():
        lines = list(_wrapped(meaning, " " * column, width))
        beside = len(term) + 4 <= column and lines
        yield f"  {term}".ljust(column) + lines.pop(0).lstrip() if beside else f"  {term}"
        yield from lines


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    lines = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_HELD, " ") for line in lines]
