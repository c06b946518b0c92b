"""Lists the classes and functions that a pickle written here may name, as loading a pickle runs what it names.

The lists hold what torch, numpy and Python need for data, and classes that were reviewed. Constructing one of these
from any arguments only stores them, or computes a value of them in little time and memory. None opens, connects or
looks up anything, or calls an argument. Other names are written only on request. Names that `attacks` knows as attacks
are never written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ckptconv.options.table import Options
from ckptconv.pickles import attacks
from ckptconv.pickles.known import CLASSES, ENUMS, MENTIONED, TENSORS, named
from ckptconv.pickles.nodes import COMPOSITES, Composite, Global, Opaque
from ckptconv.structure.soundness import PLAIN_KINDS

# Kinds of tensors of torch's own classes, and storages that are leaves themselves.
KINDS = PLAIN_KINDS | {"storage"}
_GETATTR = named(("builtins __builtin__", "getattr"))
_DEFAULTDICT = Global("collections", "defaultdict")
_FRACTION = Global("fractions", "Fraction")
_RECONSTRUCT = named(("numpy.core.multiarray numpy._core.multiarray", "_reconstruct"))
# Numpy's arrays and scalars of elements that are not plain: objects and records.
_NUMPY = named(
    ("numpy", "dtype"),
    ("numpy.core.multiarray numpy._core.multiarray", "scalar"),
    ("numpy.core.numeric numpy._core.numeric", "_frombuffer"),
)
_CALLED = _NUMPY | _RECONSTRUCT | _GETATTR | {_DEFAULTDICT, _FRACTION}
# Types of keys that hash quickly, and cannot be crafted to share a hash.
_KEYS = frozenset({str, int, float, bool, bytes, type(None)})
_SMALL = 1 << 60
_RATIO = re.compile(r"-?[0-9]{1,4000}(/[0-9]{1,4000})?")
_MEMBER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
_TENSOR_NAMES = frozenset(map(str, TENSORS))


def _is_listed(node: Opaque) -> bool:
    """Whether a call only makes data of its arguments."""
    cls, args = node.cls, node.args
    if type(cls) is not Global or type(args) is not tuple or node.call not in ("reduce", "newobj") or node.kwargs:
        return False
    if len(node.state) > 1 or not all(map(_is_state, node.state)):
        return False
    if cls in CLASSES or cls in ENUMS or cls in _NUMPY:
        return True
    if cls in _RECONSTRUCT:
        return args == (Global("numpy", "ndarray"), (0,), b"b")
    if cls == _DEFAULTDICT:
        return len(args) <= 1
    if cls == _FRACTION:
        return all(type(arg) is int or (type(arg) is str and _RATIO.fullmatch(arg)) for arg in args)
    if cls in _GETATTR:
        return len(args) == 2 and args[0] in ENUMS and type(args[1]) is str and bool(_MEMBER.fullmatch(args[1]))
    return False


def _is_state(state: Any) -> bool:
    """Whether setting this state changes nothing of an object but its values."""
    parts = state if type(state) is tuple else (state,)
    return not any(
        type(name) is str and name.startswith("__") for part in parts if isinstance(part, dict) for name in part
    )


def unlisted(node: Any) -> str:
    """Return the class or function that makes `node`, a node of a tree, if it is on no list; "" for all other nodes.

    The arguments of the call count too; the object's state and items do not.
    """
    kind = type(node)
    if isinstance(node, Composite):
        return "" if node.kind in COMPOSITES or node.kind in _TENSOR_NAMES else node.kind
    if kind is Global:
        listed = node in CLASSES or node in ENUMS or node in TENSORS or node in MENTIONED or node in _CALLED
        return "" if listed else str(node)
    if kind is not Opaque:
        return ""
    if not _is_listed(node):
        return str(node.name)
    for part in node.args if node.cls not in _GETATTR else ():
        if type(part) is Opaque and not _is_listed(part):
            return part.name
        if type(part) is Global and unlisted(part):
            return str(part)
    return ""


def plain_items(node: Any) -> dict[Any, Any] | None:
    """Return the items of a defaultdict as a plain dict; None for other nodes, or if keys may be slow to hash."""
    if type(node) is not Opaque or node.cls != _DEFAULTDICT or not _is_listed(node):
        return None
    plain = all(type(key) in _KEYS and (type(key) is not int or -_SMALL < key < _SMALL) for key, _ in node.items)
    return dict(node.items) if plain else None


def is_unlisted_kind(kind: str) -> bool:
    """Whether the subclass of tensors with this full name is on no list."""
    return kind not in _TENSOR_NAMES


def attack(node: Any) -> str:
    """Return the name that `node` calls or mentions, and that no checkpoint has a reason to call; "" if none."""
    if type(node) is Composite:
        named = Global(*node.kind.rpartition(".")[::2])
    else:
        named = node.cls if type(node) is Opaque else node
    if type(named) is not Global:
        return ""
    if attacks.is_suspect(named):
        return str(named)
    found = attacks.ways_out(named, node.args) if type(node) is Opaque and type(node.args) is tuple else ()
    return next(map(str, found), "")


def leaving_out(options: Options) -> Callable[[str, Any], Any] | None:
    """Return the function that tells `keymap.describe` which objects not known to be data to leave out.

    If they are to be kept, it returns them, so that `describe` lists them. A defaultdict becomes a plain dict if only
    its factory is unknown. Return None if no structure record is written: then no object is, and all tensors are.
    """

    def leave_out(name: str, node: Any) -> Any:
        if not unlisted(node):
            return False
        if options.opaque == "keep":
            return node
        items = plain_items(node)
        return True if items is None else items

    return leave_out if options.structure else None
