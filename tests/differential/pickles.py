"""Pickles by grammar: programs for the machine that no pickler writes, most of which run to their end.

`Program` writes opcodes, and keeps account of the memo as Python does. Each has its forms chosen by chance: numbers in
text, indices out of order, containers from odd arguments, objects that are given a state while something else holds
them, and all that is allowed and has two ways to be understood.
"""

from __future__ import annotations

import builtins
import pickle
import random
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from mutations import of_bytes, of_opcodes, opcodes

from differential.cases import Case

# One name of a module is one object, as a pickler sees, however Python came to import it.
Counter.__module__ = sys.intern(Counter.__module__)
INTEGERS = [0, 1, -1, 2, 127, 128, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 63, 1 << 70]
# Numbers in text, after their opcode: what int() and float() read, and what C's strtol does.
INT_TEXTS = [
    "0", "1", "00", "01", "-0", "+0", "+1", "001", "-1", "-01", "0x10", "0o7", "0b1", "1_0", "_1", "1_", "10L", "1L",
    "+01", "0x1", "00L", "0_1", "٣", "1e2", "1.0", "99999999999999999999", "0X1f", "-0x8", "0O17", "0777", "True",
    "+00", "000", "-", "1__0", " 1", "1 ", "\t01", "01 ", " 00", "\x0b1", "1\r", "01\r", "", "\xa01", "1\0", "01\0",
    "- 1",
]  # fmt: skip
FLOAT_TEXTS = [
    "0", "-0", "1.5", "-0.0", "1e400", "inf", "-inf", "nan", "-nan", "+nan", "infinity", "1_0.5", "0x1p3", ".5", "5.",
    "1e5", "NaN", "-Infinity", "1e-400", "+1.", "1,5", "1d5", " 1.5", "1.5 ", "1.5\r", "1.5\0", "\xa01", "", "+-1",
]  # fmt: skip
STRING_TEXTS = [
    "'a'", '"a"', "'\\x41'", "'\\101'", "'\\n'", "'a' ", " 'a'", "'a", "a", "''", "'''", "'\\''", "'\\N{DASH}'",
    "'\\u0041'", "'\xe9'", "'\\xe9'", "'\\xc3\\xa9'", "'a''b'", '"\'"', "'\\400'", "'\\\\'", "'\\q'", "'a\\",
    "'\\x4'", "\"a'",
]  # fmt: skip
UNICODE_TEXTS = [
    "a", "", "\\u0041", "\\U0001f600", "\\ud800", "\xe9", "\\\\u0041", "\\x41", "\\n", "\\u12", "\\u000a", "a\r",
    "\0",
]  # fmt: skip
STRINGS = [b"", b"a", b"1", b"\xc3\xa9", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\0", b"\xff", b"\xed\xb0\x80", b"a\nb"]
FLOATS = [
    b"\0" * 8, b"\x80" + b"\0" * 7, b"\x7f\xf8" + b"\0" * 6, b"\xff\xf8" + b"\0" * 5 + b"\1",
    b"\x7f\xf0" + b"\0" * 5 + b"\1", struct.pack(">d", 1.0), struct.pack(">d", 2.0), struct.pack(">d", 1.5),
    struct.pack(">d", float("inf")),
]  # fmt: skip
INDICES = [0, 1, 2, 3, 5, 7, 64, 99, 100, 254, 255, 256, 257, 1000, 65536, 1 << 20]
NAMES = [
    ("builtins", "list"), ("builtins", "dict"), ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "tuple"),
    ("builtins", "bytes"), ("builtins", "bytearray"), ("builtins", "str"), ("builtins", "int"), ("builtins", "float"),
    ("builtins", "bool"), ("builtins", "complex"), ("builtins", "range"), ("builtins", "slice"),
    ("__builtin__", "set"), ("__builtin__", "long"), ("__builtin__", "unicode"), ("__builtin__", "xrange"),
    ("builtins", "object"), ("collections", "OrderedDict"), ("collections", "Counter"), ("collections", "deque"),
    ("collections", "defaultdict"), ("_codecs", "encode"), ("copyreg", "_reconstructor"),
    ("copy_reg", "_reconstructor"), ("copyreg", "__newobj__"), ("copyreg", "__newobj_ex__"), ("my.module", "Thing"),
    ("my.module", "Thing.Inner"), ("builtins", "Ellipsis"), ("torch", "float32"), ("mymod", "_rebuild"),
    ("UserDict", "UserDict"), ("builtins", "reduce"), ("__builtin__", "reduce"), ("itertools", "izip"),
    ("exceptions", "KeyError"), ("b\u00fcro", "Ding"),
]  # fmt: skip
ATTACKS = [
    ("os", "system"), ("posix", "system"), ("builtins", "eval"), ("__builtin__", "apply"), ("subprocess", "Popen"),
    ("builtins", "getattr"), ("runpy", "run_path"), ("commands", "getoutput"), ("shutil", "rmtree"), ("nt", "system"),
    ("urllib", "urlopen"), ("dbm", "open"), ("anydbm", "open"), ("whichdb", "whichdb"), ("builtins", "exec"),
    ("os.path", "join"), ("importlib", "import_module"), ("os", "popen.write"), ("torch.hub", "load"),
]  # fmt: skip


def long1(value: int, more: int = 0) -> bytes:
    """LONG1, with so many needless bytes of sign."""
    data = value.to_bytes(value.bit_length() // 8 + 1 + more, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


class Program:
    """Opcodes, and what the memo holds after them: by index, whether it can be a key."""

    def __init__(self, chance: random.Random, protocol: int) -> None:
        self.chance = chance
        self.protocol = protocol
        self.codes: list[bytes] = []
        self.memo: dict[int, bool] = {}
        self.budget = chance.choice([5, 10, 20, 60])

    def add(self, *codes: bytes) -> None:
        self.codes += codes

    def one_of(self, *choices: Callable[[], Any]) -> Any:
        return self.chance.choice(choices)()

    def whole(self) -> list[bytes]:
        if self.protocol or self.chance.random() < 0.3:
            self.add(bytes([0x80, self.protocol]))
        self.value(0)
        self.add(b".")
        if self.protocol >= 4 and self.chance.random() < 0.3:
            self._frame()
        if self.chance.random() < 0.1:
            self.codes.insert(self.chance.randrange(len(self.codes)), self.chance.choice(NOISE))
        return self.codes

    def _frame(self) -> None:
        """Some of the opcodes in a frame, of the right length or of another."""
        start = self.chance.randrange(1, len(self.codes))
        stop = self.chance.choice([len(self.codes), self.chance.randrange(start, len(self.codes) + 1)])
        length = sum(map(len, self.codes[start:stop])) + self.chance.choice([0, 0, 0, 0, 1, -1])
        self.codes.insert(start, b"\x95" + struct.pack("<Q", max(length, 0)))

    # ---- values

    def value(self, depth: int, *, key: bool = False) -> None:
        """Opcodes that leave one value on the stack; one that can be hashed, if it is to be a key."""
        self.budget -= 1
        known = [index for index, hashable in self.memo.items() if hashable or not key]
        roll = self.chance.random()
        if known and roll < 0.25:
            self.get(self.chance.choice(known))
            return
        hashable = True
        if depth > 6 or self.budget < 0 or roll < 0.5 or (key and roll < 0.9):
            self.plain()
        elif key:
            self.tuple(depth + 1, key=True)
        else:
            hashable = self.chance.choice(
                [self.tuple, self.container, self.container, self.called, self.called, self.stored]
            )(depth + 1)
        self.around(hashable)

    def around(self, hashable: bool) -> None:
        """What may happen to a value that is on the stack: it is stored, or something comes and goes above it."""
        roll = self.chance.random()
        if roll < 0.45:
            self.put(hashable)
        elif roll < 0.48:
            self.add(b"2", b"0")
        elif roll < 0.5:
            self.add(b"(", b"N", b"N", b"1")
        elif roll < 0.51:
            self.add(b"(", b"0")

    def put(self, hashable: bool) -> None:
        index = self.chance.choice([len(self.memo)] * 4 + [self.chance.choice(INDICES)])
        if self.protocol >= 4 and self.chance.random() < 0.4:
            index = len(self.memo)
            self.add(b"\x94")
        elif index < 256 and self.chance.random() < 0.6:
            self.add(b"q" + bytes([index]))
        elif self.chance.random() < 0.7:
            self.add(b"r" + struct.pack("<I", index))
        else:
            self.add(b"p" + self.index_text(index) + b"\n")
        self.memo[index] = hashable

    def get(self, index: int) -> None:
        if index < 256 and self.chance.random() < 0.7:
            self.add(b"h" + bytes([index]))
        elif self.chance.random() < 0.7:
            self.add(b"j" + struct.pack("<I", index))
        else:
            self.add(b"g" + self.index_text(index) + b"\n")

    def index_text(self, index: int) -> bytes:
        forms = [f"{index}"] * 6 + [
            f"+{index}",
            f"0{index}",
            f" {index}",
            f"{index:#x}",
            f"{index} ",
            f"{index}L",
            f"{index:_}",
        ]
        return self.chance.choice(forms).encode()

    def plain(self) -> None:
        chance = self.chance
        number, text, data = chance.choice(INTEGERS), chance.choice(STRINGS), chance.choice(STRINGS)
        small = chance.choice([0, 1, 1, 2])
        self.add(
            chance.choice(
                [
                    b"N", b"\x88", b"\x89", b"K" + bytes([small]), b"K" + bytes([small]),
                    b"M" + struct.pack("<H", small),
                    b"J" + struct.pack("<i", chance.choice([small, -1, 256, -(1 << 31)])),
                    long1(number, chance.choice([0, 0, 3])), b"\x8a\0",
                    b"\x8b" + struct.pack("<i", 2) + struct.pack("<h", small),
                    b"I" + chance.choice(INT_TEXTS).encode() + b"\n",
                    b"L" + chance.choice(INT_TEXTS).encode() + chance.choice([b"L\n", b"\n", b"l\n"]),
                    b"F" + chance.choice(FLOAT_TEXTS).encode() + b"\n", b"G" + chance.choice(FLOATS),
                    b"G" + chance.choice(FLOATS), b"S" + chance.choice(STRING_TEXTS).encode("latin-1") + b"\n",
                    b"V" + chance.choice(UNICODE_TEXTS).encode("latin-1") + b"\n",
                    b"X" + struct.pack("<I", len(text)) + text, b"X" + struct.pack("<I", len(text)) + text,
                    b"\x8c" + bytes([len(text)]) + text, b"\x8d" + struct.pack("<Q", len(text)) + text,
                    b"U" + bytes([len(data)]) + data, b"T" + struct.pack("<i", len(data)) + data,
                    b"C" + bytes([len(data)]) + data, b"B" + struct.pack("<I", len(data)) + data,
                    b"\x8e" + struct.pack("<Q", len(data)) + data, b")",
                ]
            )
        )  # fmt: skip

    def several(self, depth: int, most: int = 4, *, key: bool = False) -> int:
        count = self.chance.randrange(most + 1)
        for _ in range(count):
            self.value(depth, key=key)
        return count

    def tuple(self, depth: int, *, key: bool = False) -> bool:
        count = self.chance.randrange(5)
        if 1 <= count <= 3 and self.chance.random() < 0.7:
            for _ in range(count):
                self.value(depth, key=key)
            self.add(bytes([0x84 + count]))
        else:
            self.add(b"(")
            for _ in range(count):
                self.value(depth, key=key)
            self.add(b"t")
        return key

    def pairs(self, depth: int, most: int = 4) -> None:
        for _ in range(self.chance.randrange(most + 1)):
            self.value(depth, key=True)
            self.value(depth)

    def items(self, depth: int) -> None:
        """Adds keys and values to what is on the stack."""
        if self.chance.random() < 0.4:
            self.value(depth, key=True)
            self.value(depth)
            self.add(b"s")
        else:
            self.add(b"(")
            self.pairs(depth)
            self.add(b"u")

    def elements(self, depth: int) -> None:
        """Adds values to the end of what is on the stack."""
        if self.chance.random() < 0.4:
            self.value(depth)
            self.add(b"a")
        else:
            self.add(b"(")
            self.several(depth)
            self.add(b"e")

    def container(self, depth: int) -> bool:
        kind = self.chance.randrange(8)
        if kind <= 1:
            self.add(self.chance.choice([b"]", b"]", b"(l"]))
            self.maybe_put()
            self.elements(depth)
        elif kind <= 3:
            self.add(self.chance.choice([b"}", b"}", b"(d"]))
            self.maybe_put()
            self.items(depth)
        elif kind == 4:
            self.add(b"(")
            self.several(depth)
            self.add(b"l")
        elif kind == 5:
            self.add(b"(")
            self.pairs(depth)
            self.add(b"d")
        elif kind == 6:
            self.add(b"\x8f")
            self.maybe_put()
            self.add(b"(")
            self.several(depth, key=True)
            self.add(b"\x90")
        else:
            self.add(b"(")
            self.several(depth, key=True)
            self.add(b"\x91")
            return True
        return False

    def maybe_put(self) -> None:
        if self.chance.random() < 0.5:
            self.put(False)

    # ---- calls

    def named(self, module: str, name: str) -> None:
        if self.protocol >= 4 and self.chance.random() < 0.5:
            for part in (module, name):
                data = part.encode()
                self.add(b"\x8c" + bytes([len(data)]) + data)
                if self.chance.random() < 0.3:
                    self.put(True)
            self.add(b"\x93")
        else:
            self.add(f"c{module}\n{name}\n".encode())
        self.around(True)

    def a_name(self) -> tuple[str, str]:
        return self.chance.choice(ATTACKS if self.chance.random() < 0.02 else NAMES)

    def arguments(self, name: str, depth: int) -> None:
        """Opcodes for what a call of this name may be given, without the mark; or for anything at all."""
        text = lambda value: self.add(b"X" + struct.pack("<I", len(value.encode())) + value.encode())  # noqa: E731
        pick = self.chance.choice
        if self.chance.random() < 0.2:
            self.several(depth, 3)
        elif name in ("list", "tuple", "set", "frozenset", "deque"):
            if self.chance.random() < 0.9:
                self.one_of(lambda: self.container(depth), lambda: self.tuple(depth, key=True), lambda: text("ab"))
            if name == "deque" and self.chance.random() < 0.7:
                self.add(pick([b"K\2", b"N", b"K\0", b"J\xff\xff\xff\xff", b"\x88", b"K\1"]))
        elif name in ("dict", "OrderedDict", "Counter"):
            self.mapping_argument(depth)
        elif name == "defaultdict":
            self.one_of(
                lambda: self.named(*self.a_name()), lambda: self.add(b"N"), lambda: self.add(b"cbuiltins\nlist\n")
            )
            if self.chance.random() < 0.6:
                self.mapping_argument(depth)
        elif name in ("int", "float", "complex", "bool", "long"):
            numbers = ["1", " 1 ", "1_0", "0x10", "-0", "nan", "-nan", "1e5", "٣", "inf", "1+2j", "", "00"]
            self.one_of(self.plain, lambda: text(pick(numbers)), lambda: self.add(b"C\x0212"))
            if self.chance.random() < 0.3:
                self.one_of(self.plain, lambda: self.add(b"K\x10"))
        elif name in ("bytes", "bytearray", "str", "unicode"):
            self.one_of(
                lambda: text("é"),
                lambda: text("ab"),
                lambda: self.add(b"](K\1K\2e"),
                lambda: self.add(b"C\1a"),
                lambda: self.add(b"K\3"),
                self.plain,
            )
            if self.chance.random() < 0.5:
                text(
                    pick(
                        ["latin1", "utf-8", "ascii", "LATIN-1", "latin_1", "l1", "iso8859_1", "utf8", "utf-16", "rot13"]
                    )
                )
            if self.chance.random() < 0.1:
                text(pick(["strict", "ignore"]))
        elif name == "encode":
            text(pick(["é", "ab", "\u0141", "\xff"]))
            if self.chance.random() < 0.9:
                text(
                    pick(
                        [
                            "latin1", "LATIN1", "utf-8", "latin_1", "l1", "iso-8859-1", "cp1252", "ascii", "utf-7",
                            "latin1 ",
                        ]
                    )
                )  # fmt: skip
        elif name in ("range", "xrange", "slice"):
            for _ in range(self.chance.randrange(1, 4)):
                self.one_of(lambda: self.add(b"K" + bytes([self.chance.randrange(9)])), self.plain)
        elif name in ("_reconstructor", "__newobj__", "__newobj_ex__"):
            self.named(*self.a_name())
            if name == "_reconstructor":
                self.one_of(lambda: self.named("builtins", "object"), lambda: self.named(*self.a_name()))
                self.one_of(lambda: self.add(b"N"), lambda: self.value(depth))
            elif name == "__newobj_ex__":
                self.add(pick([b")", b"K\1\x85"]), pick([b"}", b"}X\1\0\0\0aK\1s"]))
            else:
                self.several(depth, 2)
        else:
            self.several(depth, 3)

    def mapping_argument(self, depth: int) -> None:
        def of_pairs() -> None:
            # Keys that are the same and do not look so.
            self.add(self.chance.choice([b"](", b"("]))
            opened = self.codes[-1] == b"]("
            for _ in range(self.chance.randrange(4)):
                self.value(depth, key=True)
                self.value(depth, key=True)
                self.add(b"\x86")
            self.add(b"e" if opened else b"t")

        def of_a_dict() -> None:
            self.add(b"}")
            self.items(depth)

        def of_text() -> None:
            self.add(self.chance.choice([b"X\2\0\0\0aa", b"X\0\0\0\0", b"](X\2\0\0\0abX\2\0\0\0cde", b"N"]))

        self.one_of(of_pairs, of_pairs, of_a_dict, of_a_dict, lambda: self.container(depth), of_text, lambda: None)

    def called(self, depth: int) -> bool:
        """An object or value that is made by a call, by any of the opcodes for it, and what is done to it."""
        module, name = self.a_name()
        how = self.chance.choice(["reduce", "reduce", "reduce", "object", "inst", "new", "new_ex"])
        if how == "inst":
            self.add(b"(")
            self.arguments(name, depth)
            self.add(f"i{module}\n{name}\n".encode())
        elif how == "object":
            self.add(b"(")
            self.named(module, name)
            self.arguments(name, depth)
            self.add(b"o")
        else:
            self.named(module, name)
            self.add(b"(")
            self.arguments(name, depth)
            self.add(b"t")
            if self.chance.random() < 0.1:
                self.put(False)
            if how == "new_ex":
                self.add(self.chance.choice([b"}", b"}", b"}X\1\0\0\0aK\1s"]))
            self.add({"reduce": b"R", "new": b"\x81", "new_ex": b"\x92"}[how])
        self.maybe_put()
        adds = {
            "deque": self.elements, "list": self.elements, "dict": self.items, "OrderedDict": self.items,
            "Counter": self.items, "defaultdict": self.items,
        }.get(name)  # fmt: skip
        if adds and self.chance.random() < 0.5:
            adds(depth)
        if self.chance.random() < (0.1 if hasattr(builtins, name) else 0.4):
            self.one_of(lambda: self.state(depth), lambda: self.elements(depth), lambda: self.items(depth))
            self.maybe_put()
        return name in ("frozenset", "str", "bytes", "int", "float", "complex", "bool", "range", "encode", "Thing")

    def state(self, depth: int) -> None:
        """Gives a state to what is on the stack."""
        if self.chance.random() < 0.6:
            self.add(b"}")
            for _ in range(self.chance.randrange(3)):
                name = self.chance.choice([b"a", b"b", b"__dict__", b"items", b"__class__", b"__setstate__", b"1"])
                self.add(b"X" + struct.pack("<I", len(name)) + name)
                self.value(depth)
                self.add(b"s")
            self.one_of(
                lambda: None,
                lambda: None,
                lambda: self.add(b"N", b"\x86"),
                lambda: self.add(b"}X\1\0\0\0bK\1s", b"\x86"),
            )
        else:
            self.value(depth)
        self.add(b"b")

    def stored(self, depth: int) -> bool:
        """A persistent id."""
        if self.chance.random() < 0.3:
            self.add(b"P" + self.chance.choice([b"a", b"1", b"", b"\xc3\xa9", b" x", b"a\r"]) + b"\n")
        else:
            self.one_of(lambda: self.tuple(depth), lambda: self.tuple(depth), self.plain)
            self.add(b"Q")
        return True


NOISE = [
    b"0", b"1", b"2", b"(", b"N", b"t", b"\x80\x02", b"\x80\x05", b"\x80\x06", b"\x95" + b"\0" * 8, b"\x94", b"l",
    b".", b"h\0", b"b", b"R", b"\x97", b"\x98", b"\x82\1", b"a", b"s", b"e", b"u", b"\x90",
]  # fmt: skip


def grammar(chance: random.Random) -> list[bytes]:
    return Program(chance, chance.choice([0, 1, 2, 2, 3, 4, 4, 5])).whole()


# --------------------------------------------------------------------------------------------------- by honest means


class Thing:
    """An object of a class that no reader has."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def steady(keys: list[Any]) -> list[Any]:
    """Those of `keys` that are in a set in the same order in every process; one of any kind, if there are none."""
    return [key for key in keys if type(key) in (bool, int)] or keys[:1]


def honest_value(chance: random.Random, depth: int = 0, *, key: bool = False) -> Any:
    """A value as programs hold them."""
    plain: list[Any] = [
        None, True, False, 0, 1, -5, 255, 1 << 40, -(1 << 70), 0.0, -0.0, 1.5, float("inf"), float("nan"), "",
        "weight", "é", "\ud800", "a\nb\\", b"", b"ab\xff", 1j, ..., range(3), (), "x" * 300, b"y" * 300,
    ]  # fmt: skip
    if depth > 3 or chance.random() < 0.3:
        value = chance.choice(plain)
        return None if key and value is ... else value
    count = chance.randrange(5)
    if key:
        parts = [honest_value(chance, depth + 1, key=True) for _ in range(count)]
        return chance.choice([tuple, lambda found: frozenset(steady(found))])(parts)
    values = [honest_value(chance, depth + 1) for _ in range(count)]
    keys = [honest_value(chance, depth + 1, key=True) for _ in range(count)]
    pairs = list(zip(keys, values, strict=True))
    kinds: list[Callable[[], Any]] = [
        lambda: values, lambda: tuple(values), lambda: dict(pairs), lambda: OrderedDict(pairs),
        lambda: set(steady(keys)), lambda: frozenset(steady(keys)), lambda: deque(values), lambda: deque(values, 3),
        lambda: defaultdict(list, pairs),
        lambda: Counter(dict(pairs)), lambda: bytearray(b"ab"), lambda: [values, values],
        lambda: {"a": values, "b": (values,)}, lambda: Thing(a=values), lambda: [slice(1, 2), values],
        lambda: defaultdict(None, pairs), lambda: [OrderedDict, set], lambda: {**dict(pairs), "again": pairs},
    ]  # fmt: skip
    return chance.choice(kinds)()


def honest(chance: random.Random) -> bytes:
    dumps = chance.choice([pickle.dumps, pickle._dumps])
    return dumps(honest_value(chance), chance.randrange(6))


def a_pickle(chance: random.Random) -> Case:

    roll = chance.random()
    if roll < 0.15:
        return Case([honest(chance)], honest=True)
    if roll < 0.6:
        return Case(grammar(chance))
    data = honest(chance)
    if roll < 0.9:
        return Case(of_opcodes(opcodes(data), chance))
    return Case([bytes([byte]) for byte in of_bytes(data, chance)])
