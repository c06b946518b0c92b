"""One reading: what our machine makes of a pickle is what Python's unpicklers and torch's make of it, or it refuses.

Programs of opcodes, enumerated and random, run in our machine; in Python's unpickler in C over a file as torch reads
archives (no `peek`) and over one as it reads streams; in the one in Python; and in torch's for `weights_only`. They may
call nothing but what is known to be harmless.
"""

from __future__ import annotations

import io
import itertools
import pickle
import random
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from effort import TIMES
from torch import _weights_only_unpickler as weights_only

from ckptconv.errors import CkptconvError, CorruptError
from ckptconv.formats.torch.objects import vocabulary
from ckptconv.pickles import machine
from ckptconv.pickles.containers import CONSTANTS, PYTHON, TAKES_ARGUMENTS
from ckptconv.pickles.nodes import Global, NumpyArray, NumpyScalar, Opaque, Size, TorchConstant, today

# ------------------------------------------------------------------------------------------------------- references

_MODULE = np.ndarray.__reduce__(np.zeros(1))[0].__module__  # numpy._core.multiarray, or numpy.core.multiarray
HARMLESS = {today(name) for name in PYTHON} | set(CONSTANTS)
HARMLESS |= {("torch", name) for name in ("Size", "float32", "float16", "float", "strided", "device")} | {
    ("numpy", "dtype")
}
HARMLESS |= {("torch.serialization", "_get_layout")}
HARMLESS |= {(_MODULE, "_reconstruct"), (_MODULE, "scalar"), ("numpy", "ndarray")}


class UnreadableError(Exception):
    """A reference does not read the pickle, or it is not to be told."""


def _persistent(pid: Any) -> Any:
    return ["persistent", pid]


class InC(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if today((module, name)) not in HARMLESS:
            raise UnreadableError
        return super().find_class(module, name)

    persistent_load = staticmethod(_persistent)  # type: ignore[assignment]


class InPython(pickle._Unpickler):  # type: ignore[name-defined,misc]
    find_class_of_pickle = pickle._Unpickler.find_class  # type: ignore[attr-defined]

    def find_class(self, module: str, name: str) -> Any:
        if today((module, name)) not in HARMLESS:
            raise UnreadableError
        return self.find_class_of_pickle(module, name)

    persistent_load = staticmethod(_persistent)


def _weights_only(data: bytes) -> Any:
    reader = weights_only.Unpickler(io.BytesIO(data), encoding="utf-8")
    reader.persistent_load = _persistent
    return reader.load()


REFERENCES = {
    "C, archive": lambda data: InC(io.BytesIO(data), encoding="utf-8").load(),
    "C, stream": lambda data: InC(io.BufferedReader(io.BytesIO(data)), encoding="utf-8").load(),  # type: ignore[arg-type]
    "Python": lambda data: InPython(io.BytesIO(data), encoding="utf-8").load(),
    "weights only": _weights_only,
}
WORDS = vocabulary(_persistent)


def ours(data: bytes) -> Any:
    return machine.load(data, WORDS, where="a.pkl").value


# ------------------------------------------------------------------------------------------------------- comparison

_ATOMS = (str, bytes, int, bool, float, complex, type(None), type(...), range)
_MUTABLE = (list, dict, OrderedDict, Counter, defaultdict, deque, set, bytearray)


class UnlikeError(Exception):
    pass


def compare(mine: Any, theirs: Any) -> None:
    """Raise UnlikeError unless the trees are equal in types, values, order and in what is one object."""
    _Comparison().values(mine, theirs)


class _Comparison:
    def __init__(self) -> None:
        self.pairs: dict[int, Any] = {}
        self.back: dict[int, Any] = {}

    def values(self, mine: Any, theirs: Any) -> None:
        kind = type(mine)
        if kind is Opaque:
            raise UnreadableError  # we do not claim to know it
        if kind is Global:
            self.check(getattr(theirs, "__name__", None) == today((mine.module, mine.name))[1], mine, theirs)
        elif kind is TorchConstant:
            name = str(theirs) if mine.kind == "device" else str(theirs).removeprefix("torch.")
            self.check(mine.name == name and not isinstance(theirs, (str, tuple)), mine, theirs)
        elif kind is NumpyScalar:
            self.check(isinstance(theirs, np.generic), mine, theirs)
            self.check((mine.dtype, mine.data) == (theirs.dtype.str, theirs.tobytes()), mine, theirs)
        elif kind is NumpyArray:
            self.check(isinstance(theirs, np.ndarray) and mine.shape == theirs.shape, mine, theirs)
            self.check((mine.dtype, mine.data) == (theirs.dtype.str, theirs.tobytes(mine.order)), mine, theirs)
            self.one_object(mine, theirs)
        elif kind is Size:
            self.check(type(theirs) is torch.Size and tuple(mine) == tuple(theirs), mine, theirs)
        else:
            self.check(kind is type(theirs), mine, theirs)
            if kind in _ATOMS:
                self.check(_bits(mine) == _bits(theirs), mine, theirs)
            elif self.one_object(mine, theirs):
                self.parts(mine, theirs)

    def check(self, right: bool, mine: Any, theirs: Any) -> None:
        if not right:
            raise UnlikeError(f"{mine!r:.200} / {theirs!r:.200}")

    def one_object(self, mine: Any, theirs: Any) -> bool:
        """Whether the two are met for the first time; they are the same objects elsewhere."""
        if isinstance(mine, (*_MUTABLE, NumpyArray)):
            if id(mine) in self.pairs or id(theirs) in self.back:
                self.check(self.pairs.get(id(mine)) is theirs, mine, theirs)
                return False
            self.pairs[id(mine)], self.back[id(theirs)] = theirs, mine
        return True

    def parts(self, mine: Any, theirs: Any) -> None:
        if isinstance(mine, (set, frozenset)):
            self.check(len(mine) == len(theirs), mine, theirs)
            for left, right in zip(sorted(mine, key=_sorting), sorted(theirs, key=_sorting), strict=True):
                self.values(left, right)
        elif isinstance(mine, dict):
            self.check(len(mine) == len(theirs), mine, theirs)
            for (left, value), (right, other) in zip(mine.items(), theirs.items(), strict=True):
                self.values(left, right)
                self.values(value, other)
            if type(mine) is defaultdict:
                self.check(mine.default_factory is theirs.default_factory, mine, theirs)
            elif type(mine) is not dict:
                self.values(vars(mine), vars(theirs))
        elif isinstance(mine, (list, tuple, deque)):
            self.check(len(mine) == len(theirs), mine, theirs)
            self.check(getattr(mine, "maxlen", None) == getattr(theirs, "maxlen", None), mine, theirs)
            for left, right in zip(mine, theirs, strict=True):
                self.values(left, right)
        elif type(mine) is slice:
            self.values((mine.start, mine.stop, mine.step), (theirs.start, theirs.stop, theirs.step))
        else:
            self.check(mine == theirs, mine, theirs)


def _bits(value: Any) -> Any:
    return struct.pack(">d", value) if isinstance(value, float) else repr(value)


def _sorting(value: Any) -> str:
    """An order of the elements of a set, the same for ours and theirs as far as this test makes them."""
    if type(value) is Global:
        return value.name
    if isinstance(value, (NumpyScalar, np.generic)):
        return repr(tuple(value) if isinstance(value, NumpyScalar) else (value.dtype.str, value.tobytes()))
    if isinstance(value, TorchConstant):
        return f"torch.{value.name}"
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (tuple, frozenset)):
        return "(" + ", ".join(sorted(map(_sorting, value))) + ")"
    return repr(value)


def outcome(data: bytes) -> str:
    """What becomes of a pickle: "read", as by all references that read it; "read by none"; "refused"; "not known".

    Raises UnlikeError where a reference reads something else.
    """
    try:
        mine = ours(data)
    except CkptconvError:
        return "refused"
    same = []
    for name, reference in REFERENCES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = reference(data)
        except (Exception, RecursionError):
            continue
        try:
            compare(mine, theirs)
        except UnreadableError:
            return "not known"
        except UnlikeError as difference:
            raise UnlikeError(f"{data!r}: we / {name}: {difference}") from None
        same.append(name)
    return "read" if same else "read by none"


# --------------------------------------------------------------------------------------------------------- programs


def put(index: int) -> bytes:
    return b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


ATOMS = [
    b"N", b"\x88", b"\x89", b"K\0", b"K\1", b"K\2", b"J\xff\xff\xff\xff", b"M\x2c\x01", b"\x8a\0", b"\x8a\1\xff",
    b"G\0\0\0\0\0\0\0\0", b"G\x80\0\0\0\0\0\0\0", b"G\x3f\xf0\0\0\0\0\0\0", b"G\x7f\xf8\0\0\0\0\0\0",
    b"X\1\0\0\0a", b"\x8c\1a", b"X\0\0\0\0", b"U\1a", b"C\1a", b"B\1\0\0\0a", b"\x96\1\0\0\0\0\0\0\0a",
    b"I1\n", b"I01\n", b"I00\n", b"L1L\n", b"F1\n", b"Fnan\n", b"Va\n", b"S'a'\n", b")", b"]", b"}", b"\x8f", b"(t",
    b"(l", b"(d",
    named("torch", "float32"), named("torch", "float"),
    text("torch") + text("float32") + b"\x86", text("dtype") + text("float32") + b"\x86",
    named("builtins", "set"), text("builtins") + text("set") + b"\x86", named("__builtin__", "set"),
    named("torch", "Size") + b"K\1K\2\x86\x85R", b"K\1K\2\x86",
    *(pickle.dumps(scalar, 2)[2:-1].replace(b"q", b"r\0\0\1").replace(b"r\0\0\1", b"q")
      for scalar in (np.float32(1), np.int64(1), np.float64("nan"), np.bool_(True))),
]  # fmt: skip
CALLED = [
    named(module, name)
    for module, name in sorted(HARMLESS)
    if module in ("builtins", "collections", "_codecs") and name != "Ellipsis"
] + [named("__builtin__", "xrange"), named("UserList", "OrderedDict")]
OPERATIONS = [
    b"(", b"(", b"t", b"l", b"d", b"0", b"1", b"2", b"a", b"e", b"s", b"u", b"\x90", b"\x91", b"b", b"R", b"\x81",
    b"\x85", b"\x86", b"\x87", b"\x94", b"\x94", b"Q", b"Pa\n", b"p1\n", b"g1\n", b"\x80\2", b"\x80\4", b"\x93",
    b"o", b"\x92",
    *(put(index) for index in (0, 1, 2, 3, 5, 300)), *(get(index) for index in (0, 1, 2, 3, 5, 300)),
]  # fmt: skip


def test_numbers_and_text_spelled_in_every_way() -> None:
    numbers = [
        "1", "01", "00", "0", "-0", "+1", "+0", " 1", "1 ", "\t0", "1_0", "0x1f", "0X1", "0o17", "0b1", "010", "-1",
        "--1", "", " ", "1L", "1LL", "0L", "1l", "nan", "inf", "-inf", "Infinity", "+inf", "-nan", "NaN", "1.5", "1.",
        ".5", "1e3", "1E3", "1_0.5", "1e400", "-1e400", "1e-400", "1\0", "1\0abc", "0\0\n1", "1\r", "1\x0b", "0x1p3",
        "1j", "9" * 30, "-" + "9" * 30, "9" * 5000, "1.5\0x", "1d5",
    ]  # fmt: skip
    # With digits, and a minus, that are not ASCII.
    lines = [*(number.encode() for number in numbers), b"\xd9\xa1", b"\xef\xbc\x91", b"\xe2\x88\x921", b"\xa01"]
    texts = [
        b"'a'", b'"a"', b"'a\"", b"'a", b"a", b"'", b"''", b" 'a'", b"'a' ", b"'a'\r", b"'\\x41'", b"'\\x4'", b"'\\q'",
        b"'\\400'", b"'\\n'", b"'\\\n", b"'\xc3\xa9'", b"'\xff'", b"'\\xff'", b"'\0'", b"\\u00e9", b"\\ud800", b"\\u12",
        b"\\U0001f600", b"\xe9", b"\\", b"\\\\u0041", b"a\0b",
    ]  # fmt: skip
    seen: Counter[str] = Counter()
    for opcode in (b"I", b"L", b"F", b"V", b"S", b"P", b"Np", b"Np1\n0g", b"Nq\1g"):
        for line in lines + texts:
            seen[outcome(opcode + line + b"\n.")] += 1
    assert seen["read"] > 60
    # All that Python reads and no pickler writes is refused.
    for refused in (b"I+1\n.", b"I 1\n.", b"I-0\n.", b"I010\n.", b"I1\0\n.", b"F1_0\n.", b"F1e400\n.", b"F1\0\n."):
        with pytest.raises(CorruptError, match="instead of a number"):
            ours(refused)


def test_every_number_of_the_memo() -> None:
    """MEMOIZE takes the number of entries for its own, be it that of an entry already; PUT takes any.

    All programs of three steps, and of those of four one in eleven.
    """
    steps = [put(0), put(1), put(2), put(3), put(4), put(9), b"p1\n", b"p3\n", b"\x94"]
    seen: Counter[str] = Counter()
    for length in range(1, 5):
        every = 11 if length == 4 and TIMES == 1 else 1
        for program in itertools.islice(itertools.product(steps, repeat=length), 0, None, every):
            values = b"".join(b"K" + bytes([100 + at]) + step for at, step in enumerate(program))
            for read in range(10):
                seen[outcome(b"(" + values + get(read) + b"t.")] += 1
    assert seen["refused"] + seen["read"] == sum(seen.values())
    assert min(seen["refused"], seen["read"]) > 2000


def test_keys_that_are_equal_are_one_key() -> None:
    for first, second in itertools.product(ATOMS, repeat=2):
        for program in (
            b"}(" + first + b"K\1" + second + b"K\2u.",
            b"\x8f(" + first + second + b"\x90.",
            b"}(" + first + b"\x85K\1" + second + b"\x85K\2u.",
            b"(" + first + second + b"\x91.",
        ):
            outcome(program)


DTYPE_AND_TUPLES = (
    b"}(" + named("torch", "float32") + b"K\1" + text("dtype") + text("float32") + b"\x86K\2"
    + named("builtins", "set") + b"K\3" + text("builtins") + text("set") + b"\x86K\4u."
)  # fmt: skip


def test_a_dtype_and_a_class_as_keys_beside_tuples_of_their_names() -> None:
    assert outcome(DTYPE_AND_TUPLES) == "read"
    assert list(ours(DTYPE_AND_TUPLES).values()) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "keys",
    [
        [np.int64(1), np.int64(2), "a"], [np.float32(0.1), 0.1], [np.float32(np.nan)], [np.str_("a"), "b"],
        [(np.int64(1), "a"), (np.int64(2), "a")], [np.datetime64("2020-01-01"), np.datetime64("2020-01-02")],
        [torch.float32, torch.float16, torch.strided, torch.device("cpu"), torch.Size([1, 2]), (1, 3)], [set, list],
        [float("nan"), float("nan")],
    ],
    ids=repr,
)  # fmt: skip
def test_honest_keys_are_read(keys: list[Any]) -> None:
    for protocol in (2, 4):
        assert outcome(pickle.dumps(dict.fromkeys(keys), protocol)) == "read"
        assert outcome(pickle.dumps(frozenset(keys), protocol)) in ("read", "not known")


@pytest.mark.parametrize(
    "keys",
    [
        [np.int64(1), 1], [1, np.float32(1)], [True, np.float64(1)], [np.int64(1), np.int32(1)], [np.str_("a"), "a"],
        [np.bytes_(b"a"), b"a"], [(np.int64(1),), (1,)], [frozenset([np.int64(1)]), frozenset([1])],
        [np.complex64(1), 1.0], [np.float64("nan"), np.float64("nan")],
        [np.datetime64("2020-01-01"), np.datetime64("2020-01-01T00")],
    ],
    ids=repr,
)  # fmt: skip
def test_numpy_scalars_that_are_equal_to_other_keys_are_refused(keys: list[Any]) -> None:
    if keys[0] == keys[0] and keys[0] != keys[1]:
        pytest.skip("not equal with this numpy")
    written = [pickle.dumps(key, 2)[2:-1] for key in keys]
    # Each key starts with a memo of its own.
    data = b"\x80\2}(" + b"".join(key + b"N" for key in written) + b"u."
    with pytest.raises(CorruptError, match=r"as a key twice|may be equal in Python"):
        ours(data)


def test_objects_as_keys_differ_unless_they_are_made_by_the_same_call() -> None:
    thing = named("my.module", "Thing")
    red = named("my.module", "Colour") + text("red") + b"\x85R"
    blue = named("my.module", "Colour") + text("blue") + b"\x85R"
    assert len(ours(b"}(" + red + b"N" + blue + b"Nu.")) == 2
    assert len(ours(b"}(" + thing + b")\x81N" + thing + b")\x81Nu.")) == 2
    assert len(ours(b"}(" + red + b"q\0Nh\0Nu.")) == 1
    for other in (red, text("red")):
        with pytest.raises(CorruptError, match="may be equal in Python"):
            ours(b"}(" + red + b"N" + other + b"Nu.")


def test_constructors_make_what_python_makes_or_refuse() -> None:
    given = [
        *ATOMS, b"](K\1K\2e", b"(K\1K\1t", b"](X\1\0\0\0aK\3\x86e", b"](](X\1\0\0\0aK\3ee", b"]X\2\0\0\0aba",
        b"](]]e", b"}X\1\0\0\0aK\3s", b"\x8f(K\1K\2\x90", b"C\2ab", b"X\3\0\0\0abc", b"X\2\0\0\0\xc3\xa9",
        b"X\3\0\0\0\xe2\x82\xac",
        named("collections", "Counter") + b"X\1\0\0\0aK\3\x86\x85\x85R", named("builtins", "range") + b"K\3\x85R",
        named("collections", "deque") + b")R", named("builtins", "list"), b"X\6\0\0\0latin1", b"X\5\0\0\0utf-8", b"K\3",
    ]  # fmt: skip
    seen: Counter[str] = Counter()
    # Each with each of the others, but for a few functions at a time.
    pairs = list(itertools.product(enumerate(given), repeat=2))
    for number, function in enumerate(CALLED):
        seen[outcome(function + b")R.")] += 1
        for how in (b"R.", b"\x81.", b"}\x92.", b"}X\1\0\0\0aK\1s\x92."):
            for argument in given:
                seen[outcome(function + argument + b"\x85" + how)] += 1
        for (one, first), (other, second) in pairs:
            if TIMES > 1 or (one + other + number) % 3 == 0:
                seen[outcome(function + first + second + b"\x86R.")] += 1
        for argument in given:
            seen[outcome(b"(" + function + argument + b"o.")] += 1
            seen[outcome(b"(" + argument + b"i" + function[1:] + b".")] += 1
            seen[outcome(function + argument + b"R.")] += 1
    assert seen["read"] > 1000
    assert seen["not known"] < seen["read"] // 2


RECONSTRUCT = named(_MODULE, "_reconstruct") + named("numpy", "ndarray") + b"K\0\x85C\1b\x87R"
STATE = b"(K\1K\2\x85" + named("numpy", "dtype") + text("f8") + b"\x89\x88\x87R(K\3" + text("<")
STATE += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89C\x10" + struct.pack("<2d", 1.5, -2.5) + b"t"


@pytest.mark.parametrize(
    "program",
    [
        RECONSTRUCT + STATE + b"b.",
        # In the memo twice, far back, beyond its end; referred to from there after its BUILD.
        RECONSTRUCT + b"q\0q\1" + STATE + b"b0h\0h\1\x86.",
        RECONSTRUCT + b"q\0" + b"".join(b"N" + put(n) + b"0" for n in range(1, 200)) + STATE + b"bh\0\x86.",
        RECONSTRUCT + b"q\0" + put(1000) + put(70000) + STATE + b"bh\0j\x70\x11\1\0\x87.",
        # In containers before its BUILD.
        b"](" + RECONSTRUCT + b"q\0eh\0" + STATE + b"bh\0\x87.",
        b"]" + RECONSTRUCT + b"q\0ah\0" + STATE + b"b\x86.",
        RECONSTRUCT + b"q\0\x85h\0" + STATE + b"b\x86.",
        b"}K\1" + RECONSTRUCT + b"q\0sh\0" + STATE + b"b\x86.",
        RECONSTRUCT + b"2" + STATE + b"b\x86.",
        named("collections", "OrderedDict") + b"]K\1" + RECONSTRUCT + b"q\0\x86a\x85Rh\0" + STATE + b"b\x86.",
        named("collections", "deque") + b"]" + RECONSTRUCT + b"q\0a\x85Rh\0" + STATE + b"b\x86.",
    ],
)
def test_an_array_that_is_referred_to_before_it_is_complete(program: bytes) -> None:
    assert outcome(b"\x80\3" + program) == "read"


def test_frames_end_where_opcodes_end() -> None:
    body = b"](K\1X\3\0\0\0abcVxyz\nM\1\2C\2abe"
    frame = lambda data, length: b"\x95" + struct.pack("<Q", length) + data  # noqa: E731
    starts = {0, 1, 2, 4, 12, 17, 20, 24, 25}
    for cut in range(len(body) + 1):
        data = b"\x80\4" + frame(body[:cut], cut) + body[cut:] + b"."
        assert outcome(data) == ("read" if cut in starts else "refused"), cut
        # Followed by another frame; with one inside; beyond the end.
        rest = body[cut:] + b"."
        again = b"\x80\4" + frame(body[:cut], cut) + frame(rest, len(rest))
        assert outcome(again) == ("read" if cut in starts else "refused"), cut
        inside = frame(body[:cut] + frame(b"", 0), cut + 9) + rest
        assert outcome(b"\x80\4" + inside) == ("read" if cut in starts else "refused"), cut
        if cut in starts:
            nested = body[:cut] + frame(b"N0", 2) + rest
            assert outcome(b"\x80\4" + frame(nested, len(nested))) == "refused", cut
        assert outcome(b"\x80\4" + frame(body + b".", len(body) + 2 + cut)) == "refused", cut
    assert outcome(b"\x80\4" + frame(b"", 0) + frame(b"", 0) + b"N.") == "read"
    # All read this, and do not agree on where it ends.
    assert outcome(b"\x80\4" + frame(b"K\1.N", 4) + b"0.") == "refused"
    assert outcome(b"\x80\4K\1\0.") == "refused"
    for value in (
        "x" * 100_000,
        list(range(45_000, 68_000)),
        b"y" * 70_000,
        [b"z" * 65_000] * 3,
        {"a" * 65_536: "b" * 65_530},
    ):
        for protocol in (4, 5):
            assert outcome(pickle.dumps(value, protocol)) == "read"
            assert outcome(pickle._dumps(value, protocol)) == "read"  # type: ignore[attr-defined]


def test_names_are_found_as_they_are_spelled() -> None:
    assert outcome(named("UserList", "OrderedDict") + b")R.") == "read"
    assert type(ours(named("UserList", "OrderedDict") + b")R.")) is OrderedDict
    for module, name in (("torch", "_utils._rebuild_tensor_v2"), ("collections.abc", "x"), ("torch._utils._x", "y")):
        data = named(module, name) + b"."
        if "_rebuild" in name:
            with pytest.raises(CorruptError, match="with a different split into module and name"):
                ours(data)
        else:
            assert ours(data) == Global(module, name)
    with pytest.raises(CorruptError, match="has a class name of 1001 characters"):
        ours(named("m", "x" * 1001) + b".")


def test_new_makes_what_it_makes_without_init() -> None:
    for module, name in sorted(HARMLESS):
        for argument in (b"]K\1a", b"K\1", text("a")):
            result = outcome(named(module, name) + argument + b"\x85\x81.")
            if result == "read":
                assert (module, name) in TAKES_ARGUMENTS


def programs(seed: int) -> Iterator[bytes]:
    """Random programs, most of which come to an end."""
    dice = random.Random(seed)

    def value(depth: int) -> bytes:
        kind = dice.randrange(14 if depth else 4)
        if kind < 4:
            made = dice.choice(ATOMS)
        elif kind == 4:
            made = dice.choice([b"2", get(0), get(1), get(2), get(300)])
        elif kind < 7:
            items = b"".join(value(depth - 1) for _ in range(dice.randrange(4)))
            made = dice.choice([b"(" + items + b"t", b"](" + items + b"e", b"(" + items + b"l", b"(" + items + b"\x91"])
        elif kind < 10:
            items = b"".join(value(depth - 1) + value(depth - 1) for _ in range(dice.randrange(4)))
            made = dice.choice([b"}(" + items + b"u", b"(" + items + b"d", b"\x8f(" + items + b"\x90"])
        elif kind < 13:
            args = b"".join(value(depth - 1) for _ in range(dice.choice([0, 1, 1, 1, 2])))
            function = dice.choice(CALLED)
            made = function + b"(" + args + b"t" + dice.choice([b"R", b"R", b"R", b"\x81"])
        else:
            made = value(depth - 1) + value(depth - 1) + dice.choice([b"a", b"b", b"\x86", b"0"])
        return made + dice.choice([b"", b"", b"", b"\x94", b"\x94", put(0), put(1), put(2), put(5), put(300)])

    while True:
        data = value(3)
        for _ in range(dice.choice([0, 0, 0, 1, 2])):
            at = dice.randrange(len(data) + 1)
            data = data[:at] + dice.choice(OPERATIONS) + data[at:]
        head = dice.choice([b"\x80\2", b"\x80\4", b""])
        body = data + dice.choice([b".", b"K\7.", b"0.", b".N", b"(."])
        if head == b"\x80\4" and dice.random() < 0.3:
            head += b"\x95" + struct.pack("<Q", dice.randrange(len(body) + 1))
        yield head + body


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(seed: int) -> None:
    seen = Counter(outcome(program) for program in itertools.islice(programs(seed), 1500))
    assert seen["read"] > 200
    assert seen["refused"] > 200
