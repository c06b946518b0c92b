"""The help of each command, as data and as text. The reference, the manual pages and completion are made of it too.

The data are in reference.json, which scripts/reference.py makes of the commands: so that help needs none of these.
"""

from __future__ import annotations

import os
import sys

from ckptconv.options import GROUPS

TYPE_CHECKING = False  # typing takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

# Widest text, widest column of options beside their help, and narrowest text.
WIDTH, COLUMN, NARROWEST = 80, 30, 40
OWN = "Options"  # the heading of options that no command shares
BRIEF, LONG = "-h", "--help"
_HELD = "\xa0"  # a blank at which no line ends
REFERENCE = os.path.join(os.path.dirname(__file__), "reference.json")


class Flag:
    """An option in the help: its names, what stands after them, its help, its default in words, its environment
    variable. `group` is its heading; `common`: the short help has it. `values` are those that it may have, if they are
    few; a `switch` takes none, and `repeats` may be given more than once."""

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
    def text(self) -> str:
        """Its help, with the default and the variable."""
        parts = [self.about]
        parts += [f"[default: {self.default}]"] if self.default else []
        parts += [f"[env:{_HELD}{self.env}]"] if self.env else []
        return " ".join(parts)


class Help:
    """What the help of a command says. `commands` maps the commands of a group to their summaries."""

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
    ) -> None:
        self.path, self.usage, self.summary, self.paragraphs = path, usage, summary, paragraphs
        self.examples, self.arguments, self.flags, self.commands = examples, arguments, flags, commands

    def groups(self) -> Iterator[tuple[str, list[Flag]]]:
        """Yield each heading with its options, in order."""
        for heading in (OWN, *GROUPS):
            flags = [flag for flag in self.flags if flag.group == heading]
            if flags:
                yield heading, flags


# --------------------------------------------------------------------------------------------------------------- data


def as_json(every: Iterable[Help]) -> str:
    """Return the text of reference.json: an option that several commands have is in it once."""
    import json

    flags: dict[str, int] = {}
    commands = {}
    for page in every:
        numbers = [flags.setdefault(json.dumps(vars(each), ensure_ascii=False), len(flags)) for each in page.flags]
        commands[page.path] = json.dumps({**vars(page), "flags": numbers}, ensure_ascii=False)
    listed = ",\n".join(flags)
    named = ",\n".join(f"{json.dumps(path)}: {text}" for path, text in commands.items())
    return f'{{"flags": [\n{listed}\n],\n"commands": {{\n{named}\n}}}}\n'


def read() -> dict[str, Help]:
    """Return the help of every command, by its path: "ckptconv rows split"."""
    import json

    with open(REFERENCE, encoding="utf-8") as file:
        stored: Any = json.load(file)
    flags = [Flag(**each) for each in stored["flags"]]
    return {
        path: Help(**{**page, "flags": [flags[number] for number in page["flags"]]})
        for path, page in stored["commands"].items()
    }


def asked_for(arguments: Sequence[str]) -> str | None:
    """Return the help that these words of a command line ask for, if they ask for nothing else."""
    *path, last = arguments or [BRIEF]
    page = read().get(" ".join(["ckptconv", *path])) if last in (BRIEF, LONG) else None
    return shown(page, brief=last == BRIEF) + "\n" if page else None


# ---------------------------------------------------------------------------------------------------------------- text


def shown(page: Help, brief: bool = False) -> str:
    """Return the help as it is printed: in colours where stdout has them. `brief`: the most used options only."""
    from ckptconv.cli.terminal import coloured, columns, has_colours

    text = "\n".join(_lines(page, brief, max(min(columns(), WIDTH), NARROWEST)))
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


def _lines(page: Help, brief: bool, width: int) -> Iterator[str]:
    import textwrap

    yield from textwrap.wrap(f"Usage: {page.usage}", width, subsequent_indent="  ")
    yield ""
    for paragraph in (page.summary, *([] if brief else page.paragraphs)):
        yield from _wrapped(paragraph, "  ", width)
        yield ""
    if brief and not page.commands:
        flags = [flag for flag in page.flags if flag.common]
        yield from _listed({flag.words: flag.text for flag in flags}, width)
        yield ""
    else:
        sections = {"Commands": page.commands, "Arguments": page.arguments}
        for heading, entries in sections.items():
            if entries:
                yield from (f"{heading}:", *_listed(entries, width), "")
        for heading, group in page.groups() if not brief else ():
            yield from (f"{heading}:", *_listed({flag.words: flag.text for flag in group}, width), "")
    # Some are of several commands in a row.
    own = [each for each in page.examples if each.startswith(page.path)] or page.examples
    examples = own[:1] if brief else page.examples
    yield f"Example{'' if len(examples) == 1 else 's'}:"
    yield from (f"  {each}" for each in examples)
    if brief:
        yield from ("", "--help for all." if page.commands else f"--help for all {len(page.flags)} options.")


def _listed(entries: Mapping[str, str], width: int) -> Iterator[str]:
    """Yield terms, with what they mean beside them, or below a term that is too long."""
    column = min(max((len(term) for term in entries), default=0) + 4, COLUMN)
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
