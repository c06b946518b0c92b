"""The texts in the source of the package: messages, help and docstrings."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ckptconv"


@functools.cache
def texts_of_the_package(docstrings: bool = True) -> tuple[tuple[str, str], ...]:
    """The place and the text of each string in the package, with … for values that are put into it."""
    return tuple(_texts(docstrings))


def _texts(docstrings: bool) -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        if not docstrings:
            inner |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in inner:
                continue
            place = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield place, node.value
            elif isinstance(node, ast.JoinedStr):
                yield place, "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
