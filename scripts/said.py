"""The texts in the source of the package: messages and help."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ckptconv"


@functools.cache
def texts_of_the_package() -> tuple[tuple[str, str], ...]:
    """The place and the text of each string in the package but docstrings, with … for values that are put into it."""
    return tuple(_texts())


def saying(quote: str) -> list[str]:
    """The modules that say a message, of which a page quotes parts: … stands between them."""
    parts = quote.strip("… ").split("…")
    texts = texts_of_the_package()
    return sorted({place.rpartition(":")[0] for place, text in texts if _follow(parts, text)})


def _follow(parts: list[str], text: str) -> bool:
    """Whether the parts are in the text, one after the other."""
    at = 0
    for part in parts:
        if (found := text.find(part, at)) < 0:
            return False
        at = found + len(part)
    return True


def _texts() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = _nodes_of(ast.parse(path.read_text()))
        inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        inner |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in inner:
                continue
            place = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield place, node.value
            elif isinstance(node, ast.JoinedStr):
                yield place, "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def _nodes_of(tree: ast.AST) -> list[ast.AST]:
    """All nodes, in half the time of `ast.walk`."""
    nodes = [tree]
    for node in nodes:
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif isinstance(value, list):
                nodes += [part for part in value if isinstance(part, ast.AST)]
    return nodes
