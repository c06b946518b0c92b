"""Reads the table of productions: for each name, the arguments of its calls, and the state and items of its objects.

`reviewed.txt` was written by hand, `made.txt` by `scripts/scan/grammar.py`. A line is one production of some names:

    module,… name …: production | production …

with the productions

    call(PATTERN, …)     a call with these arguments; `call(*PATTERN)` with any number of them
    new(PATTERN, …)      an object that is made without calling the class, as NEWOBJ makes it
    value                the class may be mentioned as a value
    held                 the function may be an attribute or an item, and no argument
    data                 its objects are plain data

where `state=PATTERN`, `items=(PATTERN, PATTERN)` and `append=PATTERN` in `call` and `new` say what BUILD, SETITEM and
APPEND may give the object. A line `= name: PATTERN` is an alias. `patterns` describes the patterns.
"""

from __future__ import annotations

import ast
import functools
import os
from collections import defaultdict
from typing import NamedTuple

from ckptconv.features.scan.grammar.patterns import Notation, Pattern, current
from ckptconv.pickles.nodes import Global

# Patterns of states that become attributes.
_ATTRIBUTES = ("object", "slots")
TABLES = tuple(os.path.join(os.path.dirname(__file__), name) for name in ("reviewed.txt", "made.txt"))


class Production(NamedTuple):
    """One way to make an object. `is_call`: by a call; `rest`: the pattern of further arguments; `is_typed`: a function
    of the class takes the state, which otherwise becomes attributes unchanged."""

    is_call: bool
    args: tuple[Pattern, ...] = ()
    rest: Pattern | None = None
    state: Pattern | None = None
    items: tuple[Pattern, Pattern] | None = None
    append: Pattern | None = None
    is_typed: bool = False


class Entry(NamedTuple):
    """The known facts about a name."""

    productions: tuple[Production, ...]
    is_value: bool
    is_held: bool
    is_data: bool


class Grammar:
    """The productions of a table, each made when its name is first used: a file has few of some thousands."""

    def __init__(self, text: str) -> None:
        # By module; "=" has the aliases.
        self._lines: defaultdict[str, list[str]] = defaultdict(list)
        for line in text.split("\n"):
            modules = line[: line.find(" ")]
            for module in modules.split(",") if "," in modules else (modules,):
                self._lines[module].append(line)
        self._notation = Notation(dict(line[2:].split(": ", 1) for line in self._lines.pop("=", ())))
        self._lines.pop("#", None)
        # By module and name, which are compared faster than a `Global`.
        self._entries: dict[tuple[str, ...], Entry | None] = {}

    @property
    def names(self) -> list[Global]:
        """The names that have a production."""
        return [
            Global(module, name)
            for module, lines in self._lines.items()
            for name in dict.fromkeys(name for line in lines for name in line.partition(": ")[0].split()[1:])
        ]

    def entry(self, name: Global) -> Entry | None:
        """Return the entry of `name`, in the spelling of any release; None if there is none."""
        key = tuple(name)
        if key not in self._entries:
            lines = self._of(name) or self._of(current(name))
            self._entries[key] = self._read(lines) if lines else None
        return self._entries[key]

    def _of(self, name: Global) -> list[str]:
        """Return the productions of `name` in this spelling."""
        heads = (line.partition(": ") for line in self._lines.get(name.module, ()))
        return [production for names, _, production in heads if name.name in names.split()[1:]]

    def _read(self, lines: list[str]) -> Entry:
        words: set[str] = set()
        productions = []
        todo: list[ast.expr] = [ast.parse(line, mode="eval").body for line in lines]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.BinOp):
                todo += (node.right, node.left)
            elif isinstance(node, ast.Name):
                words.add(node.id)
            else:
                productions.append(self._production(node))
        if not words <= {"value", "held", "data"}:
            raise ValueError(f"no production: {lines}")
        return Entry(tuple(productions), "value" in words, "held" in words, "data" in words)

    def _production(self, node: ast.expr) -> Production:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in ("call", "new"):
            raise ValueError(f"no production: {ast.unparse(node)}")
        pattern = self._notation.pattern
        args = tuple(pattern(arg) for arg in node.args if not isinstance(arg, ast.Starred))
        further = next((pattern(arg.value) for arg in node.args if isinstance(arg, ast.Starred)), None)
        settings = {keyword.arg: keyword.value for keyword in node.keywords}
        items = settings.pop("items", None)
        state = settings.get("state")
        return Production(
            node.func.id == "call",
            args,
            further,
            items=(pattern(items.elts[0]), pattern(items.elts[1])) if isinstance(items, ast.Tuple) else None,
            is_typed=state is not None and ast.unparse(state) not in _ATTRIBUTES,
            **{str(name): pattern(value) for name, value in settings.items()},
        )


@functools.cache
def grammar() -> Grammar:
    """Return the grammar of the package's own tables."""
    texts = []
    for table in TABLES:
        with open(table, encoding="utf-8") as file:
            texts.append(file.read())
    return Grammar("".join(texts))
