"""The help of each command, as data and as text. The reference, the manual pages and completion use it too.

The data are in reference.json, which scripts/reference.py writes from the commands: so help imports no command.
"""

from __future__ import annotations

import os
import sys

from ckptconv.cli.registered import STRICT
from ckptconv.options import GROUPS

TYPE_CHECKING = False  # typing takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

# Widest text, widest column of options next to their help, and narrowest text.
WIDTH, COLUMN, NARROWEST = 80, 30, 40
OWN = "Options"  # the heading of options that no command shares
BRIEF, LONG = "-h", "--help"
_HELD = "\xa0"  # a blank at which no line ends
# The command whose help has the options that others share with it, and the words that ask for these alone.
BASE, SHARED = "ckptconv convert", "options"
REFERENCE = os.path.join(os.path.dirname(__file__), "reference.json")


class Flag:
    """An option in the help: its names, the word after them, help, default in words, and environment variable. `group`
    is its heading; `common`: the short help has it. `values` are its allowed values, if they are few; a `switch`
    takes none, and `repeats` may be given more than once."""

    def __init__(
        self,
        names: Iterable[str],
        metavar: str,
        about: str,
        group: str,
        default: str = "",
        env: str = "",
        common: bool = False,
        values: Iterable[str] = (),
        switch: bool = True,
        repeats: bool = False,
    ) -> None:
        self.names, self.metavar, self.about, self.group = tuple(names), metavar, about, group
        self.default, self.env, self.common = default, env, common
        self.values, self.switch, self.repeats = tuple(values), switch, repeats

    @property
    def words(self) -> str:
        """The option as it is typed, short name first: -t, --tag TAG."""
        return f"{', '.join(sorted(self.names, key=len))} {self.metavar}".rstrip()

    @property
    def word(self) -> str:
        """Its name that is a word; of several, the first."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    def is_as(self, other: Flag) -> bool:
        """Return whether an option of another command has the same words and text, and so the same default."""
        return (self.words, self.text) == (other.words, other.text)

    @property
    def brief(self) -> tuple[str, str]:
        """The option as it is typed, by its first names, and the first sentence of its help with the default."""
        short = [name for name in self.names if not name.startswith("--")][:1]
        words = f"{', '.join((*map(str.strip, short), self.word))} {self.metavar}".rstrip()
        import re

        sentence = re.split(r"(?<=\w\.)\s+(?=[A-Z])", self.about, maxsplit=1)[0]
        return words, f"{sentence} [default: {self.default}]" if self.default else sentence

    @property
    def text(self) -> str:
        """Its help, with the default and the variable."""
        parts = [self.about]
        parts += [f"[default: {self.default}]"] if self.default else []
        parts += [f"[env:{_HELD}{self.env}]"] if self.env else []
        return " ".join(parts)


class Help:
    """The help of a command. `commands` maps the commands of a group to their summaries, and `headings` are their names
    under each heading, if there are several."""

    def __init__(
        self,
        path: str,
        usage: str,
        summary: str,
        paragraphs: Sequence[str],
        examples: Sequence[str],
        arguments: Mapping[str, str],
        flags: Sequence[Flag],
        commands: Mapping[str, str],
        headings: Mapping[str, Sequence[str]],
    ) -> None:
        self.path, self.usage, self.summary, self.paragraphs = path, usage, summary, paragraphs
        self.examples, self.arguments, self.flags = examples, arguments, flags
        self.commands, self.headings = commands, headings

    def as_in(self, base: Help) -> list[Flag]:
        """Return the options that the command `base` has too; none for a group of commands."""
        is_other = not self.commands and self.path != base.path
        return [flag for flag in self.flags if is_other and any(map(flag.is_as, base.flags))]


def grouped(flags: Iterable[Flag]) -> Iterator[tuple[str, list[Flag]]]:
    """Yield each heading with its options, in order."""
    flags = list(flags)
    for heading in (OWN, *GROUPS):
        group = [flag for flag in flags if flag.group == heading]
        if group:
            yield heading, group


# --------------------------------------------------------------------------------------------------------------- data


def read() -> dict[str, Help]:
    """Return the help of every command, by its path: "ckptconv rows split"."""
    import json

    with open(REFERENCE, encoding="utf-8") as file:
        stored: Any = json.load(file)
    flags = [Flag(**flag) for flag in stored["flags"]]
    return {
        path: Help(**{**page, "flags": [flags[number] for number in page["flags"]]})
        for path, page in stored["commands"].items()
    }


def help_for(arguments: Sequence[str]) -> str | None:
    """Return the help that these words of a command line request, if they request nothing else."""
    *path, last = arguments or [BRIEF]
    if last not in (BRIEF, LONG):
        return None
    every = read()
    page = _shared(every) if path == [SHARED] else every.get(" ".join(["ckptconv", *path]))
    base = page if page and path == [SHARED] else every[BASE]
    return shown(page, base, brief=last == BRIEF) + "\n" if page else None


def _shared(every: Mapping[str, Help]) -> Help:
    """Return the page of the options that other commands share with `BASE`."""
    base = every[BASE]
    shared = [flag for page in every.values() for flag in page.as_in(base)]
    return Help(
        path=f"ckptconv help {SHARED}",
        usage="ckptconv COMMAND [OPTIONS]",
        summary="Options that convert shares with other commands.",
        paragraphs=["ckptconv help COMMAND lists the shared options of that command."],
        examples=[],
        arguments={},
        flags=[flag for flag in base.flags if any(map(flag.is_as, shared))],
        commands={},
        headings={},
    )


# ---------------------------------------------------------------------------------------------------------------- text


def shown(page: Help, base: Help, brief: bool = False) -> str:
    """Return the help as it is printed: in colours if stdout has them. Options shared with the command `base` are only
    listed. `brief`: only the most used options."""
    from ckptconv.cli.terminal import coloured, columns, has_colours

    width = max(min(columns(), WIDTH), NARROWEST)
    text = "\n".join(_brief(page, width) if brief else _lines(page, base, width))
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


def _brief(page: Help, width: int) -> Iterator[str]:
    """Yield the lines of the short help."""
    yield from (*_wrapped(page.summary, "", width), "", *_usage(page, width), "")
    if page.commands:
        yield from _commands(page, width)
    else:
        yield from (*_listed(page.arguments, width), "")
        yield from (*_listed(dict(flag.brief for flag in page.flags if flag.common), width), "")
    # Some are of several commands in a row.
    examples = [example for example in page.examples if example.startswith(page.path)] or page.examples
    yield from (*_examples(examples[:1]), "")
    yield f"{LONG} for all." if page.commands else f"{LONG} for all {len(page.flags)} options."


def _lines(page: Help, base: Help, width: int) -> Iterator[str]:
    """Yield the lines of the whole help."""
    yield from (*_usage(page, width), "")
    for paragraph in (page.summary, *page.paragraphs):
        yield from (*_wrapped(paragraph, "  ", width), "")
    yield from _commands(page, width)
    if page.arguments:
        yield from ("Arguments:", *_listed(page.arguments, width), "")
    shared = page.as_in(base)
    for heading, group in grouped(flag for flag in page.flags if flag not in shared):
        yield from (f"{heading}:", *_listed({flag.words: flag.text for flag in group}, width), "")
    if shared:
        names = ", ".join(flag.word for flag in shared)
        yield f"As for {base.path.partition(' ')[2]}, see ckptconv help {SHARED}:"
        yield from (*_wrapped(names, "  ", width), "")
    yield from _examples(page.examples)


def _usage(page: Help, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(f"Usage: {page.usage}", width, subsequent_indent="  ")


def _commands(page: Help, width: int) -> Iterator[str]:
    """Yield the lists of commands; commands that are shorthands for others share one line."""
    column = _column(page.commands)
    headings = page.headings or ({"Commands": list(page.commands)} if page.commands else {})
    for heading, names in headings.items():
        if heading == STRICT:
            yield from _wrapped(f"{heading}: {', '.join(names)}.", "", width)
        else:
            yield from (f"{heading}:", *_listed({name: page.commands[name] for name in names}, width, column))
        yield ""


def _examples(examples: Sequence[str]) -> Iterator[str]:
    if examples:
        yield f"Example{'' if len(examples) == 1 else 's'}:"
        yield from (f"  {example}" for example in examples)


def _column(terms: Iterable[str]) -> int:
    """Return the column next to terms."""
    return min(max(map(len, terms), default=0) + 4, COLUMN)


def _listed(entries: Mapping[str, str], width: int, column: int = 0) -> Iterator[str]:
    """Yield terms, with their meaning next to them from `column` on, or below a term that is too long."""
    column = column or _column(entries)
    for term, meaning in entries.items():
        lines = list(_wrapped(meaning, " " * column, width))
        beside = len(term) + 4 <= column and lines
        yield f"  {term}".ljust(column) + lines.pop(0).lstrip() if beside else f"  {term}"
        yield from lines


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    import textwrap

    lines = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_HELD, " ") for line in lines]
