"""Write the reference of the command line, and that of the JSON objects, from what the program knows itself.

python scripts/reference.py             writes pages and man in docs (see `pages`), schemas and help
python scripts/reference.py --check     says which of them are out of date
"""

from __future__ import annotations

import functools
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import schemas
import skill
from keywords import default_of

from ckptconv.cli.commands import app
from ckptconv.cli.help import BASE, BRIEF, OWN, Flag, Help, grouped
from ckptconv.cli.registered import GROUPS as REGISTERED
from ckptconv.errors import ERROR_KINDS, StoppedError
from ckptconv.options import GROUPS, REPORTING
from ckptconv.options.kinds import FLAG
from ckptconv.options.option import Option
from ckptconv.options.registered import FEATURES
from ckptconv.process import of_feature
from ckptconv.version import __version__

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HELP = ROOT / "ckptconv" / "cli" / "reference.json"
SCHEMAS = ROOT / "ckptconv" / "cli" / "schemas"
# The table of which command is for what, by hand.
CHOICES = ROOT / "docs" / "commands.md"
MADE = "This page is made by `scripts/reference.py`; do not edit it."
# Pages of features: the scripts whose `page` returns each, given the sentence that says that it is made.
PAGES: dict[str, str] = {
    "map-catalogue.md": "map_catalogue",  # features/maps
}
# Variables that no option has.
VARIABLES = {
    "NO_COLOR": "If set, output has no colours.",
    "FORCE_COLOR": "If set, output has colours even without a terminal; NO_COLOR takes precedence.",
    "CKPTCONV_DEBUG": "If set, an unexpected error shows its traceback.",
}


def _values(option: Option) -> Sequence[str]:
    """Return the values of an option that a shell completes."""
    for feature in FEATURES:
        completed = getattr(of_feature(feature, "options"), "COMPLETED", {})
        if option.name in completed:
            return list(completed[option.name]())
    return option.kind.choices


@functools.cache
def commands() -> tuple[Help, ...]:
    """Return the help of the program and of every command in it, in order."""
    return tuple(_below(app.made(), "ckptconv", None))


def _below(command: Any, path: str, above: Any) -> Iterator[Help]:
    with command.make_context(path, [], parent=above, resilient_parsing=True) as context:
        yield _help(command, path, command.get_params(context))
        for name, each in getattr(command, "commands", {}).items():
            yield from _below(each, f"{path} {name}", context)


def _help(command: Any, path: str, parameters: list[Any]) -> Help:
    """Return the help of a command of typer's, which has these parameters and is called by `path`."""
    commands: dict[str, Any] = getattr(command, "commands", {})
    known: Mapping[str, Option] = getattr(command.callback, "options", {})
    about: Mapping[str, str] = getattr(getattr(command.callback, "__wrapped__", None), "arguments", {})
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
            _flag(each, known.get(each.name), name, REPORTING if known else OWN)
            for each in parameters
            if each.param_type_name == "option" and not each.hidden
        ],
        commands={name: _summary(each) for name, each in commands.items()},
        headings={heading: list(names) for heading, names in REGISTERED.items() if names} if not name else {},
    )


def _told(text: str) -> tuple[list[str], list[str]]:
    """Return the paragraphs of a command's docstring, and the lines of its examples."""
    before, _, after = text.partition("\b\nExamples:\n")
    examples, _, more = after.partition("\n\n")
    lines = textwrap.dedent(examples).splitlines()
    return [" ".join(each.split()) for each in f"{before}\n\n{more}".split("\n\n") if each.strip()], lines


def _summary(command: Any) -> str:
    """Return the first sentence of a command's help."""
    return re.split(r"(?<=[.?])\s", _told(command.help)[0][0])[0]


def _flag(parameter: Any, option: Option | None, command: str, others: str) -> Flag:
    names = (*parameter.opts, *parameter.secondary_opts)
    if option is None:
        about = f"Show all options; {BRIEF} shows the most used." if BRIEF in names else parameter.help or ""
        return Flag(sorted(names), "", about, others)  # those of the help come from a set
    return Flag(
        names,
        option.metavar or "",
        option.about,
        option.group,
        default_of(option, command),
        f"{option.env}=0" if option.env and option.kind is FLAG else option.env,
        option.common is True or command in str(option.common).split(),
        _values(option),
        option.kind is FLAG,
        parameter.multiple,
    )


def variables(flags: Iterable[Flag]) -> dict[str, str]:
    """Return {variable: what it is for} of the options that have one."""
    found = {}
    for flag in flags:
        name, is_switch, _ = flag.env.partition("=")
        option = max(flag.names, key=len)
        found[name] = f"0 means {option}." if is_switch else f"The default of {option}."
    return {name: about for name, about in found.items() if name}


def exit_codes() -> dict[str, str]:
    """Return {exit code: when a command ends with it}."""
    codes = {"0": "Success: all outputs are complete."}
    for kind in ERROR_KINDS:
        told = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
        code = "130, 143" if kind is StoppedError else str(kind.exit_code)
        codes[code] = f"{codes[code]} {told}" if code in codes else told
    return codes


# ------------------------------------------------------------------------------------------------------ docs/cli.md


_OPTIONS = "Each has one meaning. Where commands put it in other words, there is a row for these."
_FORMERS = "Names that options had before are still taken, and a remark says so:"
_ENVIRONMENT = "An option comes before its variable. Only the command line reads them, not the library."


def cli_page() -> str:
    """The reference of the command line, in Markdown."""
    every = commands()
    base = _base(every)
    lines = ["# The command line", "", f"<!-- {MADE} -->", "", _sentences(every[0]), ""]
    lines += [f"- [`{each.path}`](#{each.path.replace(' ', '-')}): {each.summary}" for each in every[1:]]
    for command in every:
        lines += ["", f"## {command.path}", "", "```text", command.usage, "```", ""]
        lines += [_sentences(command), ""] if command is not every[0] else []
        if command.arguments:
            lines += ["| argument | |", "|---|---|"]
            lines += [f"| `{name}` | {_cell(about)} |" for name, about in command.arguments.items()]
            lines.append("")
        shared = command.as_in(base)
        own = [flag for flag in command.flags if flag not in shared]
        lines += [f"[Options](#options): {_names(own)}." if own else ""]
        lines += (
            [f"As for [`{base.path}`](#{base.path.replace(' ', '-')}): {_as_for(command, base)}."] if shared else []
        )
        lines += ["", "```text", *command.examples, "```"]
    lines += ["", "## Options", "", _OPTIONS, ""]
    for heading in (OWN, *GROUPS):
        meanings = [each for each in _meanings(every) if each.flag.group == heading]
        if meanings:
            lines += [f"| {heading} | | default |", "|---|---|---|"]
            lines += [each.row for each in meanings]
            lines.append("")
    lines += [_FORMERS, ""]
    lines += [
        f"- {', '.join(f'`{name}`' for name in names)}: `{former}` for `{flag}`"
        for (former, flag), names in formers().items()
    ]
    lines += ["", "## Environment", "", _ENVIRONMENT, ""]
    flags = [flag for each in every for flag in each.flags]
    lines += ["| variable | |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(about)} |" for name, about in {**variables(flags), **VARIABLES}.items()]
    lines += ["", "## Exit codes", "", "| code | |", "|---|---|"]
    lines += [f"| {code} | {_cell(about)} |" for code, about in exit_codes().items()]
    return "\n".join(lines) + "\n"


def _base(every: Sequence[Help]) -> Help:
    """Return the command whose options others share."""
    return next(command for command in every if command.path == BASE)


def _names(flags: Iterable[Flag]) -> str:
    return ", ".join(f"`{flag.word}`" for flag in flags)


def _as_for(command: Help, base: Help, form: str = "`{}`") -> str:
    """Return which options of the command `base` a command has: these, or all but the others."""
    shared = command.as_in(base)
    others = [flag for flag in base.flags if not any(map(flag.is_as, shared))]
    few = shared if len(shared) <= len(others) else others
    return ("" if few is shared else "all but ") + ", ".join(form.format(flag.word) for flag in few)


def formers() -> dict[tuple[str, str], list[str]]:
    """Return the commands that take an option by a name that it had, by that name and today's."""
    found: dict[tuple[str, str], list[str]] = {("--optimizer", "--states"): ["convert --to dcp"]}

    def look(command: Any, path: str) -> None:
        for option in getattr(command.callback, "options", {}).values():
            if option.former:
                found.setdefault((option.former, option.flags[0]), []).append(path)
        for name, each in getattr(command, "commands", {}).items():
            look(each, f"{path} {name}".strip())

    look(app.made(), "")
    return found


class Meaning(NamedTuple):
    """What an option means, as all commands say it or some of them."""

    flag: Flag
    of: list[tuple[str, Flag]]
    """The commands that say so, each with its option."""

    is_only: bool
    """Whether no command says anything else."""

    @property
    def row(self) -> str:
        """The row of a table."""
        where = "" if self.is_only else f" ({', '.join(f'`{command}`' for command, _ in self.of)})"
        return f"| `{_cell(self.flag.words)}`{where} | {_cell(self.flag.about)} | {_cell(_defaults(self.of))} |"


def _meanings(every: Sequence[Help]) -> list[Meaning]:
    """Return the meanings of all options, those of one name together."""
    found: dict[str, dict[tuple[str, str], list[tuple[str, Flag]]]] = {}
    for command in every:
        for flag in command.flags:
            said = found.setdefault(flag.word, {}).setdefault((flag.words, flag.about), [])
            said.append((command.path.partition(" ")[2] or command.path, flag))
    return [Meaning(of[0][1], of, len(said) == 1) for said in found.values() for of in said.values()]


def _defaults(flags: list[tuple[str, Flag]]) -> str:
    """Return the default of an option, for each command if they differ."""
    of: dict[str, list[str]] = {}
    for command, flag in flags:
        of.setdefault(flag.default, []).append(command)
    if len(of) == 1:
        return next(iter(of))
    usual = max(of, key=lambda default: len(of[default]))
    others = [f"{', '.join(commands)}: {default or 'none'}" for default, commands in of.items() if default != usual]
    return "; ".join([*others, f"others: {usual or 'none'}"])


def _sentences(told: Help) -> str:
    return "\n\n".join([told.summary, *told.paragraphs])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


# ------------------------------------------------------------------------------------------------------ docs/json.md

_INTRODUCTION = """\
With `--json` a command prints exactly one JSON object on stdout, also when it fails. Warnings and progress go to
stderr. The schemas of all objects (JSON Schema, draft 2020-12) are in the package, in `ckptconv/cli/schemas/`:

    python -c "import ckptconv.cli; print(ckptconv.cli.__path__[0])"

`version` is 1. A later release may add fields, and publishes them in its schemas; a field that goes, or changes its
meaning, changes the version."""


def json_page() -> str:
    """The fields of all objects, in Markdown, from the descriptions in the schemas."""
    found = schemas.schemas()
    lines = ["# JSON", "", f"<!-- {MADE} -->", "", _INTRODUCTION]
    for name in sorted(found, key=lambda name: (name == "error", name)):
        schema = found[name]
        lines += ["", f"## {schema['title']}", ""]
        lines += [f"{schema['description']} Schema: [`{name}.json`](../ckptconv/cli/schemas/{name}.json).", ""]
        lines += ["| field | type | |", "|---|---|---|"]
        lines += [f"| `{field}` | {kind} | {_cell(about)} |" for field, kind, about in _fields(schema, schema, "")]
    return "\n".join(lines) + "\n"


def _fields(schema: Any, whole: Any, above: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and description of every field of an object, and of the objects in it."""
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        optional = "" if name in required else ", optional"
        yield above + name, _type(field) + optional, field.get("description", "")
        inside, dots = field, "."
        if "items" in field:
            inside, dots = field["items"], "[]."
        elif field.get("additionalProperties"):
            inside, dots = field["additionalProperties"], ".*."
        for each in (inside, *inside.get("oneOf", [])):
            yield from _fields(each, whole, f"{above}{name}{dots}")
    if schema.get("$ref", "").startswith("#/$defs/"):
        yield from _fields(whole["$defs"][schema["$ref"].removeprefix("#/$defs/")], whole, above)


def _type(field: Any) -> str:
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(each)}`" for each in field["enum"])
    kinds = field.get("type", "any")
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


# ----------------------------------------------------------------------------------------------------------- manual


def man_pages() -> dict[str, str]:
    """Return {file name: text} of the manual pages: one of the program and one of each command."""
    every = commands()
    return {f"{each.path.replace(' ', '-')}.1": _man(each, every) for each in every}


def _man(told: Help, every: Sequence[Help]) -> str:
    name = told.path.replace(" ", "-")
    lines = [f'.TH {name.upper()} 1 "" "ckptconv {__version__}" "ckptconv"', ".SH NAME"]
    lines += [f"{_roff(name)} \\- {_roff(told.summary.rstrip('.'))}", ".SH SYNOPSIS", f".B {_roff(told.usage)}"]
    lines.append(".SH DESCRIPTION")
    for number, paragraph in enumerate([told.summary, *told.paragraphs]):
        lines += [*([".PP"] if number else []), _roff(paragraph)]
    for heading, entries in (("COMMANDS", told.commands), ("ARGUMENTS", told.arguments)):
        lines += [f".SH {heading}"] if entries else []
        lines += [line for term, about in entries.items() for line in _term(term, about)]
    lines.append(".SH OPTIONS")
    base = _base(every)
    main = every[0], base
    shared = told.as_in(base)
    own = [flag for flag in told.flags if flag not in shared]
    for heading, flags in grouped(own):
        lines += [f".SS {heading}", *(line for flag in flags for line in _term(flag.words, flag.text))]
    if shared:
        lines += [f".SS As for {_roff(base.path.replace(' ', '-'))}(1)"]
        lines.append(_roff(f"{_as_for(told, base, '{}')}."))
    if told is every[0]:
        flags = [flag for each in every for flag in each.flags]
        lines += [".SH EXIT STATUS", *(line for code, about in exit_codes().items() for line in _term(code, about))]
        found = {**variables(flags), **VARIABLES}
    else:
        found = variables(own)
    lines += [".SH ENVIRONMENT"] if found else []
    lines += [line for variable, about in found.items() for line in _term(variable, about)]
    lines += [".SH EXAMPLES", ".nf", *map(_roff, told.examples), ".fi", ".SH SEE ALSO"]
    others = [each.path.replace(" ", "-") for each in every if each is not told and (each in main or told is every[0])]
    lines += [f".BR {_roff(each)} (1){',' if each != others[-1] else ''}" for each in others]
    return "\n".join(lines) + "\n"


# Characters that roff would take for something else, or show as another.
_ROFF = str.maketrans(
    {
        "\\": "\\e",
        "-": "\\-",
        "'": "\\(aq",
        "`": "\\(ga",
        "^": "\\(ha",
        "~": "\\(ti",
        '"': "\\(dq",
        "\xa0": "\\ ",
        "…": "...",
        "Σ": "\\(*S",
        "×": "\\(mu",
        "−": "\\(mi",
    }
)


def _term(term: str, about: str) -> list[str]:
    return [".TP", f".B {_roff(term)}", _roff(about)]


def _roff(text: str) -> str:
    text = text.translate(_ROFF)
    return f"\\&{text}" if text.startswith(".") else text


# ------------------------------------------------------------------------------------------------------------- main


def help_json(every: Iterable[Help]) -> str:
    """Return the text of reference.json: an option that several commands have is in it once."""
    flags: dict[str, int] = {}
    commands = {}
    for page in every:
        numbers = [flags.setdefault(json.dumps(vars(flag), ensure_ascii=False), len(flags)) for flag in page.flags]
        commands[page.path] = json.dumps({**vars(page), "flags": numbers}, ensure_ascii=False)
    listed = ",\n".join(flags)
    named = ",\n".join(f"{json.dumps(path)}: {text}" for path, text in commands.items())
    return f'{{"flags": [\n{listed}\n],\n"commands": {{\n{named}\n}}}}\n'


def pages() -> dict[Path, str]:
    """Return {file: text} of all that this script writes."""
    manual = {DOCS / "man" / name: text for name, text in man_pages().items()}
    return {
        HELP: help_json(commands()),
        DOCS / "cli.md": cli_page(),
        DOCS / "json.md": json_page(),
        **{DOCS / name: import_module(module).page(MADE) for name, module in PAGES.items()},
        DOCS / "SKILL.md": skill.page(commands(), exit_codes(), CHOICES.read_text("utf-8"), MADE),
        **{SCHEMAS / name: text for name, text in schemas.texts().items()},
        **manual,
    }


def stale() -> list[Path]:
    """Return the files that are not as they would be written now, and pages and schemas of what is no more."""
    made = pages()
    there = {
        path: path.read_text("utf-8") for path in [*made, *DOCS.glob("man/*"), *SCHEMAS.glob("*")] if path.exists()
    }
    return sorted(path for path in {*made, *there} if made.get(path) != there.get(path))


def main() -> None:
    if "--check" in sys.argv:
        wrong = [f"{path.relative_to(ROOT)} is out of date: run scripts/reference.py." for path in stale()]
        print(*wrong, sep="\n", end="\n" if wrong else "")
        sys.exit(bool(wrong))
    made = pages()
    for path in stale():
        path.unlink(missing_ok=True)
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
