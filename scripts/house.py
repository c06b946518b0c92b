"""Draws the rooms of the package and what each imports, from the imports themselves, and says what is out of order.

    python scripts/house.py            writes the picture in CONTRIBUTING.md anew, and prints the sizes (roads.py)
    python scripts/house.py --check    changes nothing; exit code 1 where the picture or an import is out of order
    python scripts/house.py --without [NAME]   copies the checkout without a feature (without.py), or lists them

A room is a folder or a module directly in ckptconv/. It imports only from rooms below it in `ORDER`.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ckptconv"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- house: begin -->", "<!-- house: end -->"
# The rooms from the lowest to the highest.
ORDER = (
    "errors", "version", "text", "cells", "process", "options", "result", "tensors", "plan", "storage", "pickles",
    "engine", "structure", "formats", "outputs", "publish", "conversion",
    "cli", "features", "__main__", "__init__",
)  # fmt: skip
# Too many arrows lead to these to be drawn.
EVERYWHERE = ("errors", "version", "text", "cells", "process", "options", "result")


def imports() -> Iterator[tuple[str, str, str, str]]:
    """Each import in the package of the package: the room that imports, the room that is imported, and both modules."""
    for path in sorted(PACKAGE.rglob("*.py")):
        words = path.relative_to(ROOT).with_suffix("").parts
        module, room = ".".join(words), words[1]
        for node in nodes_of(path):
            for name in _imported(node, words):
                if name.split(".")[0] == "ckptconv":
                    yield room, _room_of(name), module, name


@functools.cache
def nodes_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The statements of a module that import something, wherever they stand."""
    found: list[ast.Import | ast.ImportFrom] = []
    todo: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        # Statements only: they are few among the nodes.
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, part, None)
            todo += inside if isinstance(inside, list) else []
    return found


def _imported(node: ast.Import | ast.ImportFrom, words: tuple[str, ...]) -> list[str]:
    """The modules, or names in modules, that a statement imports; `words` is the module that it stands in."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    above = [*words[: len(words) - node.level], *filter(None, [node.module])] if node.level else [node.module or ""]
    return [".".join([*above, alias.name]) for alias in node.names]


@functools.cache
def _room_of(name: str) -> str:
    """The room that `name`, such as ckptconv.storage.files.look, is in."""
    room = [*name.split("."), ""][1]
    return room if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").exists() else "__init__"


def rooms() -> dict[str, set[str]]:
    """What each room imports of the others."""
    found: dict[str, set[str]] = {name: set() for name in ORDER}
    for room, imported, _, _ in imports():
        if room != imported:
            found.setdefault(room, set()).add(imported)
    return found


def upwards() -> list[str]:
    """The imports that lead up, or between rooms that are not in `ORDER`, a sentence each."""
    found = []
    for room, imported, module, name in imports():
        found += [
            f"{each} is no room of the plan (scripts/house.py)." for each in (room, imported) if each not in ORDER
        ]
        if room != imported and {room, imported} <= set(ORDER) and ORDER.index(room) < ORDER.index(imported):
            found.append(f"{module} imports {name}, which is above it.")
    return found


def cycles() -> list[tuple[str, ...]]:
    """Modules that import each other, wherever in them."""
    edges: dict[str, set[str]] = {}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    for path in PACKAGE.rglob("*.py"):
        words = path.relative_to(ROOT).with_suffix("").parts
        names = [name for node in nodes_of(path) for name in _imported(node, words)]
        into = {name if name in modules else name.rpartition(".")[0] for name in names}
        edges[".".join(words)] = into & modules
    reached = {module: _reached(module, edges) for module in edges}
    return sorted({tuple(sorted(m for m in reached[n] if n in reached[m])) for n in edges if n in reached[n]})


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    """All that can be reached from `start` in at least one step."""
    found: set[str] = set()
    todo = [*edges[start]]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += edges[name]
    return found


def floors(edges: Mapping[str, set[str]]) -> dict[str, int]:
    """On which floor each room is: 1 where it imports no other, else one above the highest that it imports."""
    found: dict[str, int] = {}
    for name in sorted(edges, key=ORDER.index):
        found[name] = 1 + max((found.get(below, 0) for below in edges[name]), default=0)
    return found


def picture() -> str:
    """The plan as a diagram of mermaid. An arrow leads from a room to one that it imports; those that follow from
    others, and those to the rooms that all import, are left out."""
    edges = {name: below - {*EVERYWHERE} for name, below in rooms().items() if name not in (*EVERYWHERE, "__init__")}
    lines = ["```mermaid", "graph TD"]
    for name in reversed(ORDER):
        below = edges.get(name, set())
        implied = {further for each in below for further in _reached(each, edges)}
        lines += [f"    {name} --> {each}" for each in sorted(below - implied, key=ORDER.index, reverse=True)]
    return "\n".join([*lines, "```"])


def written(page: str) -> str:
    """The text of the page with the picture as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{picture()}\n{END}{after}"


def main() -> None:
    if sys.argv[1:2] == ["--without"]:
        import without

        without.main(sys.argv[2:])
        return
    wrong = [*upwards(), *(f"These import each other: {', '.join(found)}." for found in cycles())]
    page = PAGE.read_text("utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(written(page), "utf-8")
    elif written(page) != page:
        wrong.append("The picture in CONTRIBUTING.md is out of date: run scripts/house.py.")
    found = floors(rooms())
    print(f"{len(found)} rooms on {max(found.values())} floors")
    if "--check" not in sys.argv:
        import roads

        print(*roads.report(), sep="\n")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
