"""Makes pickles that the grammar allows: of each production, random values that its patterns take."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable
from pathlib import Path

from attacks.assemble import NONE, called, dotted, dtype, listed, mapped, name, number, raw, several, text

from ckptconv.features.scan.grammar.table import TABLES

# Of what a regular expression takes, when the first characters of its classes do not do.
_TEXTS = (
    "a", "UTC", "MT19937", "PCG64", "1/3", "1.5", "10.0.0.1", "d", "i", "<", "abcd", "(?s)", "y ~ a", "_call_linear",
    "f4",
)  # fmt: skip
_LEAVES: dict[str, Callable[[random.Random], bytes]] = {
    "text": lambda rng: text(rng.choice(["", "a", "keys", "__import__('os')", "1e999", "é" * 20])),
    "bytes": lambda rng: raw(rng.randbytes(rng.choice([0, 1, 8, 40]))),
    "bytearray": lambda rng: b"\x96" + (8).to_bytes(8, "little") + rng.randbytes(8),
    "bool": lambda rng: rng.choice([b"\x88", b"\x89"]),
    "int": lambda rng: number(rng.choice([0, 1, -1, 7, 2**31 - 1])),
    "long": lambda rng: number(rng.choice([0, 5, 2**31 - 1])),
    "float": lambda rng: b"G" + rng.randbytes(8),
    "complex": lambda rng: called(name("builtins", "complex"), b"G" + bytes(8), b"G" + bytes(8)),
    "slice": lambda rng: called(name("builtins", "slice"), number(1), b"N", b"N"),
    "size": lambda rng: called(name("torch", "Size"), listed(number(2))),
    "a_tensor": lambda rng: b"N",
    "an_array": lambda rng: called(
        name("numpy._core.numeric", "_frombuffer"), raw(bytes(8)),
        dtype("f8"), several(number(1)), text("C"),
    ),
    "dtype": lambda rng: dtype(rng.choice(("f8", "O8"))),
    "array_state": lambda rng: several(number(1), several(number(1)), dtype("O8"), b"\x89", listed(b"N")),
    "masked_state": lambda rng: several(
        number(1), several(number(1)), dtype("f8"), b"\x89", raw(bytes(8)), raw(bytes(1)), NONE
    ),
    "numbers": lambda rng: called(
        name("numpy._core.numeric", "_frombuffer"), raw(bytes(8)), dtype("f8"), several(number(1)), text("C")
    ),
    "arrow_array": lambda rng: several(
        called(name("pyarrow.lib", "type_for_alias"), text("int64")), number(1), number(0), number(0),
        listed(NONE, called(name("pyarrow.lib", "py_buffer"), raw(bytes(8)))), b"]", NONE,
    ),
    "pandas_blocks": lambda rng: several(
        called(
            name("pandas._libs.internals", "_unpickle_block"),
            called(
                name("numpy._core.numeric", "_frombuffer"), raw(bytes(8)), dtype("f8"), several(number(1), number(1)),
                text("C"),
            ),
            called(name("builtins", "slice"), number(0), number(1), number(1)), number(2),
        ),
    ),
    "wkb": lambda rng: raw(b"\1\1\0\0\0" + bytes(16)),
    "plain_dtype": lambda rng: dtype("f8"),
    "a_scalar": lambda rng: called(
        name("numpy._core.multiarray", "scalar"), dtype("f8"), raw(bytes(8)),
    ),
    "some_class": lambda rng: name("numpy", "ndarray"),
}  # fmt: skip


class Sampler:
    """Makes the opcodes of random objects. `rng` decides. With `has_traps`, any object is an `argparse.Namespace`, and
    the state of a class has one under each name in `methods`, by module and name of the class."""

    has_traps = False

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.methods: dict[str, list[str]] = {}
        self._class = ""
        self.lines: dict[tuple[str, str], list[ast.expr]] = {}
        self.aliases: dict[str, ast.expr] = {}
        for line in "".join(Path(table).read_text() for table in TABLES).splitlines():
            head, colon, production = line.partition(": ")
            words = head.split()
            if not colon or words[0] == "#":
                continue
            node = ast.parse(production, mode="eval").body
            if words[0] == "=":
                self.aliases[words[1]] = node
                continue
            for module in words[0].split(","):
                for each in words[1:]:
                    self.lines.setdefault((module, each), []).append(node)

    def made(self, module: str, named: str, depth: int = 0) -> bytes:
        """The opcodes of an object that a production of a name allows. Raises ValueError if none is at hand."""
        productions = [part for node in self.lines.get((module, named), []) for part in _either(node)]
        productions = [part for part in productions if isinstance(part, ast.Call)]
        if not productions or depth > 6:
            raise ValueError(named)
        node = self.rng.choice(productions)
        self._class = f"{module} {named}"
        cls = dotted(module, named) if "." in named else name(module, named)
        args = [self.value(arg, depth + 1) for arg in node.args if not isinstance(arg, ast.Starred)]
        rests = [arg.value for arg in node.args if isinstance(arg, ast.Starred)]
        args += [self.value(rest, depth + 1) for rest in rests for _ in range(self.rng.randrange(3))]
        made = called(cls, *args) if node.func.id == "call" else cls + several(*args) + b"\x81"  # type: ignore[attr-defined]
        told = {keyword.arg: keyword.value for keyword in node.keywords}
        if "append" in told:
            made += self.value(told["append"], depth + 1) + b"a"
        if "items" in told:
            made += b"".join(self.value(part, depth + 1) for part in told["items"].elts) + b"s"  # type: ignore[attr-defined]
        if "state" in told:
            self._class = f"{module} {named}"
            made += self.value(told["state"], depth + 1) + b"b"
        return made

    def value(self, node: ast.expr, depth: int) -> bytes:
        """The opcodes of a value that a pattern takes."""
        rng = self.rng
        match node:
            case ast.BinOp():
                for part in rng.sample(_either(node), len(_either(node))):
                    try:
                        return self.value(part, depth)
                    except ValueError:
                        continue
                raise ValueError(ast.unparse(node))
            case ast.Name(id="any" | "held" | "data" as kind):
                return self._anything(kind, depth)
            case ast.Name(id=word):
                return _LEAVES[word](rng) if word in _LEAVES else self.value(self.aliases[word], depth)
            case ast.Attribute():
                module, _, named = ast.unparse(node).rpartition(".")
                return self.made(module, named, depth + 1)
            case ast.Constant(value=value):
                return _constant(value)
            case ast.Tuple(elts=[each, ast.Constant(value=value)]) if value is ...:
                return several(*(self.value(each, depth + 1) for _ in range(rng.randrange(3))))
            case ast.Tuple(elts=parts):
                return several(*(self.value(part, depth + 1) for part in parts))
            case ast.List(elts=[each]):
                return listed(*(self.value(each, depth + 1) for _ in range(rng.randrange(3))))
            case ast.Dict(keys=keys, values=values):
                pairs: list[bytes] = []
                methods, self._class = self.methods.get(self._class, []), ""
                for key, held in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant):
                        attribute = str(key.value)
                        if not attribute.endswith("?") or rng.random() < 0.5:
                            pairs += (text(attribute.removesuffix("?")), self.value(held, depth + 1))
                    elif rng.random() < 0.7:
                        named = (
                            self.value(key, depth + 1) if key else text(rng.choice(["keys", "append", "shape", "x"]))
                        )
                        pairs += (named, self.value(held, depth + 1))
                if self.has_traps and None in keys:
                    exact = {str(key.value).removesuffix("?") for key in keys if isinstance(key, ast.Constant)}
                    pairs += [part for each in methods if each not in exact for part in (text(each), self._trap())]
                return mapped(*pairs)
            case ast.Call(func=ast.Name(id="type"), args=[of]):
                module, _, named = ast.unparse(of).rpartition(".")
                return name(module, named)
            case ast.Call(func=ast.Name(id="upto"), args=[ast.Constant(value=int(most))]):
                return number(rng.choice([0, 1, min(most, 2**31 - 1)]))
            case ast.Call(func=ast.Name(id="re"), args=[ast.Constant(value=str(form))]):
                fitting = [each for each in _TEXTS if re.fullmatch(form, each)]
                if fitting:
                    return text(rng.choice(fitting))
            case ast.Call(func=ast.Name(id="constant"), args=[ast.Constant(value="dtype")]):
                return name("torch", "float32")
            case ast.Call(func=ast.Name(id="constant"), args=[ast.Constant(value="layout")]):
                return name("torch", "strided")
        raise ValueError(ast.unparse(node))

    def _trap(self) -> bytes:
        return name("argparse", "Namespace") + b")\x81"

    def _anything(self, kind: str, depth: int) -> bytes:
        """The opcodes of any value: what a class could call, look into, or compare."""
        rng = self.rng
        simple = [b"N", number(5), text("x"), listed(number(1)), mapped(text("a"), number(1)), several(number(2))]
        if self.has_traps and (depth < 2 or rng.random() < 0.8):
            return self._trap()
        if kind == "data" or depth > 3:
            return rng.choice(simple)
        trap = name("argparse", "Namespace") + b")\x81" + mapped(
            *(part for each in ("keys", "items", "append", "setdefault", "get", "shape", "__len") for part in
              (text(each), name("builtins", "int")))
        ) + b"b"  # fmt: skip
        objects = [trap, name("builtins", "int"), called(name("collections", "OrderedDict"))]
        return rng.choice([*simple, *objects, trap])


def _either(node: ast.expr) -> list[ast.expr]:
    return [*_either(node.left), *_either(node.right)] if isinstance(node, ast.BinOp) else [node]


def _constant(value: object) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    return number(value) if isinstance(value, int) else raw(value) if isinstance(value, bytes) else text(str(value))
