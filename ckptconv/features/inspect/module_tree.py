"""The tensors of a checkpoint as a tree of modules, and the tree as rows that fit a screen. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from ckptconv.features.reporting.tensor_info import TensorInfo

# The most dots at which a name is split.
DEEPEST = 60
# Key of a tensor inside the module of the same name. No part of a name has a dot.
_ITSELF = "."
_NUMBER = re.compile(r"\d{1,9}")


@dataclass(slots=True)
class ModuleInfo:
    """A module."""

    name: str
    """Its path, with dots; empty for the whole."""

    tensors: int
    """Tensors in it, at all depths."""

    elements: int
    """Elements of these; of tied tensors once."""

    bytes: int
    """Size of these; of tied tensors once."""

    dtypes: list[str]
    """Dtypes of its tensors."""


@dataclass(slots=True)
class Module:
    """A module: the numbers of tensors, elements and bytes in it, and its children.

    A tensor is a module with a `shape` and without children. `tied` is the name of its tied tensor, where its bytes are
    counted. Two modules with the same `form` hold tensors of the same names, dtypes and shapes.
    """

    name: str
    children: dict[str, Module] = field(default_factory=dict)
    tensors: int = 0
    elements: int = 0
    nbytes: int = 0
    dtypes: dict[str, None] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    tied: str = ""
    form: int = 0


class Row(NamedTuple):
    """A line of the tree: its depth, its label, the module, and the number of equal modules in the row.

    For modules that are not shown, `module` is None, and `hidden` has them.
    """

    depth: int
    label: str
    module: Module | None
    alike: int = 1
    hidden: Sequence[Module] = ()


def tree(tensors: Sequence[TensorInfo], aliases: Mapping[str, str]) -> Module:
    """Return the tree of `tensors` by the dots in their names."""
    root = Module("")
    # {name of a module, with a dot after it: the modules from the root to it}. Neighbours are mostly in one module.
    inside = {"": [root]}
    for row in tensors:
        parts = row.name.split(".", DEEPEST)
        last = parts.pop()
        head = row.name.removesuffix(last)
        path = inside.get(head)
        if path is None:
            path = inside[head] = [root]
            for part in parts:
                path.append(_child(path[-1], part))
        leaf = _child(path[-1], last)
        if leaf.children:
            path = [*path, leaf]
            leaf = leaf.children.setdefault(_ITSELF, Module(""))
        leaf.shape, leaf.tied = row.shape, aliases.get(row.name, "")
        leaf.tensors += 1
        leaf.dtypes[row.dtype] = None
        if not leaf.tied:
            leaf.elements += math.prod(row.shape)
            leaf.nbytes += row.bytes
        # A dtype in a module is also in the modules around it.
        if row.dtype not in path[-1].dtypes:
            for module in path:
                module.dtypes[row.dtype] = None
    _sum_up(root)
    return root


def _child(module: Module, part: str) -> Module:
    """Return the child of that name; add it if there is none."""
    if module.shape is not None:
        _move_inside(module)
    child = module.children.get(part)
    if child is None:
        child = module.children[part] = Module(part)
    return child


def _move_inside(module: Module) -> None:
    """Move a tensor that has the name of a module into that module, under an empty name."""
    tensor = replace(module, name="", children={}, dtypes=dict(module.dtypes))
    module.children[_ITSELF] = tensor
    module.shape, module.tied = None, ""
    module.tensors = module.elements = module.nbytes = 0


def _sum_up(root: Module) -> None:
    """Count the contents of each module, and number its form."""
    forms: dict[Any, int] = {}
    order = [root]
    for module in order:
        order.extend(module.children.values())
    for module in reversed(order):
        inside = []
        for child in module.children.values():
            inside.append((child.name, child.form))
            module.tensors += child.tensors
            module.elements += child.elements
            module.nbytes += child.nbytes
        described = (tuple(inside), module.shape, tuple(module.dtypes), bool(module.tied))
        module.form = forms.setdefault(described, len(forms))


def totals(root: Module) -> Iterator[ModuleInfo]:
    """Yield the contents of every module that is not a tensor, the root first."""
    stack = [("", root)]
    while stack:
        name, module = stack.pop()
        yield ModuleInfo(name, module.tensors, module.elements, module.nbytes, list(module.dtypes))
        inside = [
            (f"{name}.{child.name}" if name or module is not root else child.name, child)
            for child in module.children.values()
        ]
        stack.extend((path, child) for path, child in reversed(inside) if child.shape is None)


def rows(root: Module, depth: int | None, most: int | None = None, fold: bool = True) -> Iterator[Row]:
    """Yield the rows of the tree to `depth` levels (None: all), by name; at most `most` children of a module.

    With `fold`, consecutive numbered modules with the same form, such as layers, become one row.
    """
    stack = _children(root, 1, most, fold)[::-1]
    while stack:
        row = stack.pop()
        yield row
        if row.module is not None and (depth is None or row.depth < depth):
            stack.extend(_children(row.module, row.depth + 1, most, fold)[::-1])


def _children(module: Module, depth: int, most: int | None, fold: bool) -> list[Row]:
    rows_of_children = []
    for group in _groups(module, fold):
        first, alike = group[0], len(group)
        label = _label(group)
        # A module with only one child, or only several equal ones, gets no line of its own.
        while first.shape is None and len(inside := list(_groups(first, fold))) == 1:
            (group,) = inside
            label += f".{_label(group)}"
            first, alike = group[0], alike * len(group)
        rows_of_children.append(Row(depth, label, first, alike))
    if most is not None and len(rows_of_children) > most:
        hidden = [row.module for row in rows_of_children[most:] for _ in range(row.alike) if row.module is not None]
        rows_of_children[most:] = [Row(depth, "", None, hidden=hidden)]
    return rows_of_children


def _label(group: Sequence[Module]) -> str:
    return group[0].name if len(group) == 1 else f"{group[0].name}…{group[-1].name}"


def _groups(module: Module, fold: bool) -> Iterator[list[Module]]:
    """Yield the children of `module`, in groups that each become one row."""

    def key(numbered: tuple[int, Module]) -> Any:
        place, child = numbered
        if not fold or not _NUMBER.fullmatch(child.name):
            return place, None
        return int(child.name) - place, child.form

    children = list(module.children.values())
    if fold and all(_NUMBER.fullmatch(child.name) for child in children):
        children.sort(key=lambda child: int(child.name))  # a file may have them in the order of letters: 1, 10, 2
    for _, group in groupby(enumerate(children), key):
        yield [child for _, child in group]


def fitting_depth(root: Module, lines: int, most: int | None) -> int:
    """Return the greatest depth at which the tree takes at most `lines` lines; at least 1."""
    counts: dict[int, int] = {}
    for row in rows(root, None, most):
        counts[row.depth] = counts.get(row.depth, 0) + 1
    depth, total = 1, counts.get(1, 0)
    while depth + 1 in counts and total + counts[depth + 1] <= lines:
        depth += 1
        total += counts[depth]
    return depth
