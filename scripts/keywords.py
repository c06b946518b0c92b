"""Writes ckptconv/options/keywords.py: the types of the options of the public calls, from the table of options.

python scripts/keywords.py            writes the module anew
python scripts/keywords.py --check    changes nothing; exit code 1 where it is out of date
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckptconv.options.kinds import DTYPES, FLAG, SHORT_DTYPES
from ckptconv.options.table import (
    AVERAGING,
    DIFFING,
    DISTRIBUTED,
    FINISHING,
    INSPECTING,
    LAYOUT,
    LOADING,
    MERGING,
    OPTIONS,
    PATCHING,
    SCANNING,
    VIEWING,
    Option,
)

MODULE = Path(__file__).resolve().parents[1] / "ckptconv" / "options" / "keywords.py"
# The table of each class, and what it is of.
TABLES: dict[str, tuple[Mapping[str, Option], str]] = {
    "ConvertOptions": (OPTIONS, "Options of `convert`, `verify`, `save_state_dict` and `VirtualFiles`."),
    "InspectOptions": (INSPECTING, "Options of `inspect`."),
    "DiffOptions": (DIFFING, "Options of `diff`."),
    "PatchOptions": (PATCHING, "Options of `patch`."),
    "AverageOptions": (AVERAGING, "Options of `average`."),
    "MergeOptions": (MERGING, "Options of `merge`."),
    "ScanOptions": (SCANNING, "Options of `scan`."),
    "FinishOptions": (FINISHING, "Options of `finish`."),
    "OpenOptions": (VIEWING, "Options of `open`."),
    "LoadOptions": (LOADING, "Options of `load_state_dict`."),
    "DistributedOptions": (DISTRIBUTED, "Options of `DistributedReader`."),
    "RowsOptions": ({**OPTIONS, **LAYOUT}, "Options of `split_rows`, `pack_rows` and `check_rows`."),
}
HEAD = '''"""The options of the public calls as types, which editors complete and type checkers check.

Made by scripts/keywords.py from the table in options/table.py. Values may be what they are in Python or as on the
command line; None stands for the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypedDict


class TorchDType(Protocol):
    """A dtype of torch, which need not be installed."""

    @property
    def is_floating_point(self) -> bool: ...
    @property
    def is_complex(self) -> bool: ...
    def to_real(self) -> Any: ...


# The names of dtypes, as `options.kinds` reads them.
DTypeName: TypeAlias = Literal[
'''


def text() -> str:
    """Return the module as it is made of the table now."""
    names = "".join(f'    "{name}",\n' for name in (*DTYPES, *SHORT_DTYPES))
    return f"{HEAD}{names}]\n" + "".join(_classes())


def _classes() -> Iterator[str]:
    """Yield a class for the options that the same calls take, called after the first, then one for each call."""
    takers: dict[str, tuple[str, ...]] = {}
    for name, (table, _) in TABLES.items():
        for option in table.values():
            takers[_field(option)] = (*takers.get(_field(option), ()), name)
    fields: dict[tuple[str, ...], list[str]] = {}
    for field, names in takers.items():
        fields.setdefault(names, []).append(field)
    shared = {names: _called(own[0]) for names, own in fields.items() if len(names) > 1}
    for names, called in shared.items():
        calls = ", ".join(name.removesuffix("Options") for name in names)
        yield from _class(called, ["TypedDict"], f"{calls}.", fields[names])
    for name, (_, about) in TABLES.items():
        bases = [called for names, called in shared.items() if name in names] or ["TypedDict"]
        yield from _class(name, bases, about, fields.get((name,), ()))


def _called(field: str) -> str:
    """Return what the class is called whose first field is this one: _MaxShardSize."""
    return "_" + field.split(":", maxsplit=1)[0].strip().title().replace("_", "")


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


def _told(option: Option) -> str:
    """Return the docstring of an option: its help, and what holds without it."""
    about = option.about if option.default is not True or option.kind is not FLAG else f"False: {option.about}"
    default = option.default_of("convert")
    about += f" Default: {default}." if default else ""
    quotes = '"""' if "\\" not in about else 'r"""'
    lines = textwrap.wrap(about, 112) or ["?"]
    if len(lines) == 1:
        return f'    {quotes}{lines[0]}"""\n'
    return f"    {quotes}" + "\n    ".join(lines) + '"""\n'


def main() -> None:
    if "--check" in sys.argv:
        stale = MODULE.read_text("utf-8") != text()
        print(
            "ckptconv/options/keywords.py is out of date: run scripts/keywords.py." if stale else "", end="\n" * stale
        )
        sys.exit(stale)
    MODULE.write_text(text(), "utf-8")


if __name__ == "__main__":
    main()
