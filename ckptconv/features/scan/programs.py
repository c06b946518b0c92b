"""Judges programs in archives: TorchScript and its bytecode, the arithmetic of torch.export, pickles in JSON.

Sources: `torch/_export/serde/serialize.py` of torch 2.13, which evaluates `expr_str` and the guards of a program with
sympy and Python; stable-baselines3 2.9, `save_util.json_to_data`, which loads the text under `:serialized:`.
"""

from __future__ import annotations

import ast
import base64
import functools
import json
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from ckptconv.errors import CkptconvError
from ckptconv.pickles.children import walk
from ckptconv.pickles.machine import load
from ckptconv.pickles.vocabulary import WHOLE_TREES

OPERATORS = os.path.join(os.path.dirname(__file__), "operators.txt")
# Operators of torch that read or write files.
_OF_FILES = frozenset({"save", "from_file", "load", "_load_from_file", "pickle_load"})
_TOKEN = re.compile(
    rb"""(?P<space>[ \t\r\n\f\v\\]+|\#[^\n]*)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|"""
    rb"""(?P<quote>\"\"\"|'''|["'])|(?P<other>.)""",
    re.DOTALL,
)
# The parts of a text of each kind before its end; the character after a backslash does not count.
_ENDS = {
    quote: re.compile(rb"\\.|" + quote + (rb"|\n" if len(quote) == 1 else b""), re.DOTALL)
    for quote in (b'"', b"'", b'"""', b"'''")
}
# The first names of paths that lead to operators.
_ROOTS = (b"torch", b"ops")
# One part more than the path of an operator has.
_PARTS = 4
# Classes and constants with which TorchScript makes values; they are not operators.
_MAKERS = frozenset({"device", "dtype", "Tensor", "Generator", "layout", "memory_format", "annotate", "Size", "Stream"})
# Functions of sympy and of torch, by name, in expressions of torch.export.
_ARITHMETIC = frozenset(
    """
    Abs Add And BitwiseFn_bitwise_and BitwiseFn_bitwise_or CeilToInt CleanDiv Eq Equality FloatPow FloatTrueDiv FloorDiv
    FloorToInt Ge GreaterThan Gt Identity Integer IntTrueDiv IsNonOverlappingAndDenseIndicator Le LessThan Lt Max Min
    Mod ModularIndexing Mul Ne Not Or Piecewise PowByNatural PythonMod RoundDecimal RoundToInt Rational
    StrictGreaterThan StrictLessThan Symbol ToFloat TruncToFloat TruncToInt Unequality Where ceiling floor
    """.split()  # noqa: SIM905
)
_SYMBOL = re.compile(r"[a-zA-Z]{1,20}[0-9]{0,9}|[su]\d+|true|false|oo|int_oo")
_MOST_NODES, _MOST_TEXT = 2_000, 20_000
_SERIALIZED = ":serialized:"
# Keys of JSON whose texts are evaluated.
_EVALUATED = frozenset({"expr_str", "expr", "guards_code"})
# The target of a node of a graph: an operator, a function of Python's arithmetic, or of torch's on symbols.
_TARGET = re.compile(
    r"torch\.ops\.\w+\.(?P<operator>\w+)(\.\w+)?|torch\.sym_\w+|#\w+(:\w+)*|torch\._sym_sqrt|math\.[a-z]\w*|"
    r"_operator\.(abs|add|and_|eq|floordiv|ge|getitem|gt|invert|le|lshift|lt|mod|mul|ne|neg|not_|or_|pos|pow|rshift|sub|"
    r"truediv|xor)"
)
# Keys of JSON, in text that is JSON too, that name imported modules; and these modules.
_SPECS, _IMPORTED, _HARMLESS = ("in_spec", "out_spec"), ("default_factory_module", "fqn"), frozenset({"builtins"})


class Programs(NamedTuple):
    """The names in a program that matter: operators that read or write files, and those that torch lacks."""

    files: list[str]
    unknown: list[str]


class Texts(NamedTuple):
    """The texts in a description that matter: those evaluated that are no arithmetic, and pickles that are loaded."""

    evaluated: list[str]
    pickled: list[bytes]


@functools.cache
def operators() -> frozenset[str]:
    """Return the names of torch's operators, each without its overload."""
    with open(OPERATORS, encoding="utf-8") as file:
        return frozenset(file.read().split())


def programs_in(code: bytes) -> Programs:
    """Return the names in a program of TorchScript, or its bytecode, that it should not have: it may call them under
    other names."""
    files: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for path in _operators_in(code) if code.startswith(b"\x80") else _paths_in(code):
        shown = b".".join(path).decode("utf-8", "replace")
        if path[-1].decode("utf-8", "replace") in _OF_FILES:
            files[shown] = None
        elif not _is_operator(path):
            unknown[shown] = None
    return Programs(list(files), list(unknown))


def _paths_in(code: bytes) -> Iterator[list[bytes]]:
    """Yield the paths of names that may lead to operators."""
    path: list[bytes] = []
    before = b""
    at = 0
    while at < len(code):
        token = _TOKEN.match(code, at)
        assert token
        kind, part, at = token.lastgroup, token[0], token.end()
        if kind == "space":
            continue
        if kind == "quote":
            at = _end_of_text(code, at, part)
        if kind == "name" and before == b"." and path:
            # Of a path that is longer than any operator's, only the beginning is reported.
            path += [part] if len(path) < _PARTS else []
        elif part != b"." or not path:
            if path:
                yield path
            path = [part] if part in _ROOTS and before != b"." else []
        before = part
    if path:
        yield path


def _operators_in(bytecode: bytes) -> Iterator[list[bytes]]:
    """Yield, as paths, the operators that the functions in bytecode call. Bytecode is a pickle of tuples."""
    try:
        tree = load(bytecode, where="bytecode", limits=WHOLE_TREES).value
    except CkptconvError:
        # torch has an unpickler of its own, which may read it.
        yield [b"bytecode"]
        return
    for node in walk(tree):
        if type(node) is tuple and len(node) == 2 and node[0] == "operators" and type(node[1]) is tuple:
            for operator in node[1]:
                named = operator[0] if type(operator) is tuple and operator else None
                yield [b"ops", *named.encode("utf-8", "replace").split(b"::")] if type(named) is str else [b"operator"]


def _end_of_text(code: bytes, begin: int, quote: bytes) -> int:
    """Return the end of the text that begins after a quote; `begin` if it does not end."""
    for part in _ENDS[quote].finditer(code, begin):
        if part[0][:1] != b"\\":
            return part.end() if part[0] == quote else begin
    return begin


def _is_operator(path: list[bytes]) -> bool:
    name = path[-1].decode()
    if path[0] == b"torch":
        return len(path) == 2 and (name in operators() or name in _MAKERS)
    return len(path) == 3 and name in operators()


def texts_in(data: bytes) -> Texts | None:
    """Return the texts that programs evaluate or load in a description in JSON; None if it cannot be read."""
    try:
        todo: list[Any] = [json.loads(data)]
    except (ValueError, RecursionError):
        return None
    evaluated: dict[str, None] = {}
    pickled: list[bytes] = []
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            for key, value in node.items():
                if key in _EVALUATED:
                    for text in value if isinstance(value, list) else [value]:
                        if isinstance(text, str) and not is_arithmetic(text):
                            evaluated[text] = None
                if key == "target" and "inputs" in node and isinstance(value, str) and not _is_target(value):
                    evaluated[value] = None
                if key in _SPECS and isinstance(value, str):
                    evaluated.update(dict.fromkeys(_imported_by(value)))
                if key == _SERIALIZED and isinstance(value, str):
                    try:
                        pickled.append(base64.b64decode(value))
                    except ValueError:
                        return None
                todo.append(value)
    return Texts(list(evaluated), pickled)


def _is_target(text: str) -> bool:
    """Return whether a node calls arithmetic, or an operator of torch that accesses no files."""
    target = _TARGET.fullmatch(text)
    name = target["operator"] if target else None
    # Operators of higher order are in no list.
    is_known = name is None or name in operators() or text.startswith("torch.ops.higher_order.")
    return target is not None and is_known and name not in _OF_FILES


def _imported_by(spec: str) -> list[str]:
    """Return the modules that reading a description of a tree imports, except Python's builtins."""
    names: list[str] = []
    todo: list[Any] = [spec]
    while todo:
        node = todo.pop()
        if isinstance(node, str) and node[:1] in ("[", "{"):
            try:
                todo.append(json.loads(node))
            except (ValueError, RecursionError):
                names.append(node[:_MOST_TEXT])
        elif isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            names += [str(node[key]) for key in _IMPORTED if key in node and node[key] not in _HARMLESS]
            todo += node.values()
    return names


def is_arithmetic(text: str) -> bool:
    """Return whether an expression has only numbers, symbols, operators and functions of arithmetic."""
    if len(text) > _MOST_TEXT:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return len(nodes) < _MOST_NODES and all(map(_is_allowed, nodes))


def _is_power(base: ast.AST, power: ast.AST) -> bool:
    """Return whether a power is small, and not a power of a power."""
    is_small = isinstance(power, ast.Constant) and type(power.value) is int and 0 <= power.value <= 16
    return is_small and not any(
        isinstance(node, ast.Pow) or (isinstance(node, ast.Name) and "Pow" in node.id) for node in ast.walk(base)
    )


def _is_allowed(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, (int, float)) and abs(value) < 1 << 64
        case ast.Name(id=name):
            return name in _ARITHMETIC or _SYMBOL.fullmatch(name) is not None
        case ast.Call(func=ast.Name(id="FloatPow" | "PowByNatural"), args=[base, power], keywords=[]):
            return _is_power(base, power)
        case ast.Call(func=ast.Name(id=name), keywords=[] | [ast.keyword(arg="evaluate" | "integer" | "positive")]):
            return name in _ARITHMETIC
        case ast.BinOp(left=base, op=ast.Pow(), right=power):
            return _is_power(base, power)
        case ast.BinOp(op=op):
            return isinstance(op, (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod))
    return isinstance(
        node,
        (ast.Expression, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.keyword, ast.Tuple, ast.operator, ast.unaryop,
         ast.boolop, ast.cmpop, ast.expr_context),
    )  # fmt: skip
