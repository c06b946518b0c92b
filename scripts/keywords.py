"""Writes ckptconv/options/keywords.pyi: the types of the options of the public calls, from the table of options.

python scripts/keywords.py            writes the module anew
python scripts/keywords.py --check    changes nothing; exit code 1 where it is out of date
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ckptconv.options.keywords import tables
from ckptconv.options.kinds import CHECKPOINT, DTYPES, FLAG, OUTPUT_KIND, SHORT_DTYPES
from ckptconv.options.option import Option

STUB = Path(__file__).resolve().parents[1] / "ckptconv" / "options" / "keywords.pyi"
# What the options are for that the same calls take, by the first of them; by its type too, where it has several.
GROUPS = {
    "max_shard_size": "Sharding",
    "dtype": "Casting",
    "dequantize": "Dequantizing",
    "quantize": "Making",
    "key": "Choosing",
    "to": "Naming",
    "to: CheckpointName | None": "NamingCheckpoints",
    "states": "ReadingStates",
    "chunks": "Cutting",
    "include": "Selecting",
    "strip_prefix": "Renaming",
    "map": "Mapping",
    "size": "Measuring",
    "like": "Imitating",
    "model_key": "FindingTheModel",
    "optimizer_key": "FindingStates",
    "order": "Ordering",
    "jobs": "Working",
    "fsync": "Publishing",
    "clobber": "Planning",
    "overwrite": "Overwriting",
    "checksum": "Attesting",
    "spool_dir": "Spooling",
    "storage_options": "Connecting",
    "raw": "Undecoded",
    "alone": "SingleFile",
    "family": "Detecting",
    "master": "Precision",
    "optimizer": "WritingStates",
    "universal": "DeepSpeed",
    "html": "Showing",
}
HEAD = '''"""The options of the public calls as types, which editors complete and type checkers check.

Made by scripts/keywords.py from the tables of keywords.py. Values may be what they are in Python or as on the
command line; None stands for the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

from ckptconv.options.option import Option

def tables() -> dict[str, tuple[Mapping[str, Option], str]]: ...


class TorchDType(Protocol):
    """A dtype of torch, which need not be installed."""

    @property
    def is_floating_point(self) -> bool: ...
    @property
    def is_complex(self) -> bool: ...
    def to_real(self) -> Any: ...


'''


def text() -> str:
    """Return the module as it is made of the table now."""
    return HEAD + "".join((*_aliases(), *_classes()))


def _aliases() -> Iterator[str]:
    """Yield a type for each list of names that options take."""
    named = {
        "DTypeName": (*DTYPES, *SHORT_DTYPES),
        **{kind.accepts: kind.choices for kind in (OUTPUT_KIND, CHECKPOINT)},
    }
    for alias, names in named.items():
        values = "".join(f'    "{name}",\n' for name in names)
        yield f"\n{alias}: TypeAlias = " + (f"Literal[\n{values}]" if names else "str")
    yield "\n"


def _classes() -> Iterator[str]:
    """Yield a class for each group of options that the same calls take, then one for each call."""
    takers: dict[str, tuple[str, ...]] = {}
    for name, (table, _) in tables().items():
        for option in table.values():
            takers[_field(option)] = (*takers.get(_field(option), ()), name)
    fields: dict[tuple[str, ...], list[str]] = {}
    for field, names in takers.items():
        fields.setdefault(names, []).append(field)
    shared = {names: _called(own[0]) for names, own in fields.items() if len(names) > 1}
    for names, called in shared.items():
        calls = ", ".join(name.removesuffix("Options") for name in names)
        yield from _class(called, ["TypedDict"], f"{calls}.", fields[names])
    for name, (_, about) in tables().items():
        bases = [called for names, called in shared.items() if name in names] or ["TypedDict"]
        yield from _class(name, bases, about, fields.get((name,), ()))


def _called(field: str) -> str:
    """Return the name of the class of a group, by the first of its fields: _Sharding."""
    name, _, kind = field.partition("\n")[0].strip().partition(":")
    return "_" + (GROUPS.get(f"{name}:{kind}") or GROUPS.get(name, name.title().replace("_", "")))


def _class(name: str, bases: Sequence[str], about: str, fields: Iterable[str]) -> Iterator[str]:
    line = f"class {name}({', '.join(bases)}, total=False):"
    if len(line) > 120:
        line = f"class {name}(\n    {', '.join(bases)}, total=False\n):"
    if len(max(line.split("\n"), key=len)) > 120:
        line = f"class {name}(\n" + "".join(f"    {base},\n" for base in bases) + "    total=False,\n):"
    yield f'\n\n{line}\n    """{about}"""\n'
    yield from (f"\n{field}" for field in fields)


def _field(option: Option) -> str:
    return f"    {option.name}: {option.accepts.replace(chr(39), chr(34))}\n{_told(option)}"


def default_of(option: Option, command: str) -> str:
    """Return the behaviour of `command` without the option, in words; "" if that goes without saying."""
    is_value = option.kind is not FLAG and option.written is not None
    default = option.fallback or (str(option.written) if is_value else "")
    return default if isinstance(default, str) else default.get(command, default.get("", ""))


def _told(option: Option) -> str:
    """Return the docstring of an option: its help, and what holds without it."""
    about = option.about if option.default is not True or option.kind is not FLAG else f"False: {option.about}"
    default = default_of(option, "convert")
    about += f" Default: {default}." if default else ""
    quotes = '"""' if "\\" not in about else 'r"""'
    lines = textwrap.wrap(about, 112) or ["?"]
    if len(lines) == 1:
        return f'    {quotes}{lines[0]}"""\n'
    return f"    {quotes}" + "\n    ".join(lines) + '"""\n'


def main() -> None:
    if "--check" in sys.argv:
        stale = STUB.read_text("utf-8") != text()
        print(
            "ckptconv/options/keywords.pyi is out of date: run scripts/keywords.py." if stale else "", end="\n" * stale
        )
        sys.exit(stale)
    STUB.write_text(text(), "utf-8")


if __name__ == "__main__":
    main()
