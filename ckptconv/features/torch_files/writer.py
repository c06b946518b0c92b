"""Write pickles of protocol 2, as torch.save does: a tree in, bytes out. The inverse of `machine`.

Classes and functions are written by name and never looked up, so a pickle of torch's objects needs no torch. Shared and
cyclic containers stay so. Nothing recurses, so a tree may be of any depth.
Source: CPython's `Lib/pickle.py`; each type is written as Python 3 writes it at protocol 2.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.pickles import numpy_dtypes, torch_constants
from ckptconv.pickles.nodes import Global, NumpyArray, NumpyScalar, Size, TorchConstant
from ckptconv.pickles.set_order import ordered

_BATCH = 1000


class PersistentId(NamedTuple):
    """The persistent id of a storage of `numel` elements under `key`, which torch's loader resolves."""

    kind: str
    cls: Global
    key: str
    location: str
    numel: int


@dataclass(eq=False, slots=True)
class Call:
    """An object as the call that makes it: `function` of `args`, then list elements, dict items, and a BUILD for each
    of `states`.

    `function` is a `Global`, or, for the result of another call, the value that is written as that call. With `new` it
    is a class, whose `__new__` takes `args`.
    """

    function: Any
    args: tuple[Any, ...]
    states: tuple[Any, ...] = ()
    appended: Iterable[Any] = ()
    items: Iterable[tuple[Any, Any]] = ()
    new: bool = False


class Plain(NamedTuple):
    """A value made of calls, tuples, lists, dicts and plain values, no part of which comes again or contains itself.

    It is written at once and not put into the memo.
    """

    value: Any


class Known(NamedTuple):
    """A call that is written once for each `key`, a tuple; where the key comes again, the object is the same."""

    key: tuple[Any, ...]
    made: Call


# Turns a value that has no plain Python type, usually a tensor, into a `Call` or a `Global`; returns None if it cannot.
Reducer: TypeAlias = Callable[[Any], Any]


def dumps(tree: Any, reducer: Reducer = lambda value: None) -> bytes:
    """Return `tree` as a pickle. Raises UsageError for a value whose type has no form in a pickle, and UnsupportedError
    for a name that nothing in torch or numpy has."""
    return _Pickler(reducer).run(tree)


_CONSTANTS = {None: b"N", True: b"\x88", False: b"\x89"}
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


class _Pickler:
    """The bytes so far, and a stack of work: bytes to write, values to save, functions to call, or generators of these.

    Only values that may come again are stored in the memo; the plain parts of a `Call` are written for it alone. In a
    file of a million tensors, these would be most of the memory.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.out = bytearray()
        self.work: list[Any] = []
        # Memo indices by identity, and the objects, so that they stay alive; strings and globals by value.
        self.memo: dict[int, int] = {}
        self.alive: list[Any] = []
        self.texts: dict[Any, int] = {}
        self.count = 0

    def run(self, tree: Any) -> bytes:
        out, work, save = self.out, self.work, self.save
        out += b"\x80\x02"
        work.append(_Save(tree))
        while work:
            step = work.pop()
            if type(step) is GeneratorType:
                following = next(step, None)
                if following is None:
                    continue
                work.append(step)
                step = following
            if type(step) is bytes:
                out += step
            elif type(step) is _Save:
                save(step[0])
            else:
                step()
        out += b"."
        return bytes(out)

    def next(self, *steps: Any) -> None:
        """Do `steps` next, in this order."""
        self.work.extend(reversed(steps))

    # The memo -------------------------------------------------------------------------------------------------

    def put(self) -> bytes:
        """Return the opcode that stores the top of the stack under the next memo index."""
        number, self.count = self.count, self.count + 1
        return b"q%c" % number if number < 256 else b"r" + struct.pack("<I", number)

    @staticmethod
    def get(number: int) -> bytes:
        return b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)

    def remember(self, value: Any) -> bytes:
        self.memo[id(value)] = self.count
        self.alive.append(value)
        return self.put()

    # Values ---------------------------------------------------------------------------------------------------

    def save(self, value: Any) -> None:
        kind = type(value)
        if value is None or kind is bool:
            self.out += _CONSTANTS[value]
        elif kind is int:
            self.out += _integer(value)
        elif kind is str:
            self.text(value)
        elif kind is float:
            self.out += b"G" + _double(value)
        elif kind is Global:
            self.named(value)
        elif kind is PersistentId:
            kept = (value.kind, value.cls, _Once(value.key), value.location, value.numel)
            self.next(b"(", *map(_Save, kept), b"tQ")
        elif kind is _Once:
            self.out += _unicode(value.text)
        elif kind is Call:
            self.call(None, value)
        elif kind is Plain:
            self.plain(value[0])
        elif kind is Known:
            self.plain(value)
        elif id(value) in self.memo:
            self.out += self.get(self.memo[id(value)])
        elif kind is tuple:
            self.tuple(value)
        elif kind is dict:
            self.next(b"}" + self.remember(value), _batches(value.items(), b"s", b"u"))
        elif kind is list:
            self.next(b"]" + self.remember(value), _batches(((item,) for item in value), b"a", b"e"))
        else:
            self.call(value, self.reduced(value))

    def reduced(self, value: Any) -> Call:
        call = _reduce(value)
        if call is None:
            call = self.reducer(value)
        if call is None:
            raise UsageError(f"A value of type {type(value).__name__} cannot be written into a pickle.")
        return call if type(call) is Call else Call(None, (call,))

    def call(self, value: Any, reduction: Call) -> None:
        """Write `reduction`, which makes `value`; None for a value that cannot come again and stays out of the memo."""
        if reduction.function is None:  # a name alone
            self.next(_Save(reduction.args[0]))
            return
        if _is_plain(reduction):
            self.plain(reduction)
            if value is not None:
                self.out += self.remember(value)
            return

        opcode = b"\x81" if reduction.new else b"R"

        def finish() -> None:
            self.out += opcode if value is None else opcode + self.remember(value)

        count = len(reduction.args)
        build = [step for state in reduction.states for step in (_Save(state), b"b")]
        self.next(
            _Save(reduction.function),
            b"" if count <= 3 else b"(",
            *map(_Save, reduction.args),
            _TUPLES.get(count, b"t"),
            # Only its states and elements may contain the object itself, so it goes into the memo before these.
            finish,
            _batches(((item,) for item in reduction.appended), b"a", b"e"),
            _batches(reduction.items, b"s", b"u"),
            *build,
        )

    def plain(self, value: Any) -> None:
        """Write at once a value of which no part comes again. Tensors consist of little else."""
        kind = type(value)
        if kind is str:  # most are
            self.text(value)
        elif kind is int:
            self.out += _integer(value)
        elif kind is Call:
            self.named(value.function)
            self.plain(value.args)
            self.out += b"\x81" if value.new else b"R"
            for state in value.states:
                self.plain(state)
                self.out += b"b"
        elif kind is Known:
            number = self.texts.get(value.key)
            if number is not None:
                self.out += self.get(number)
                return
            self.plain(value.made)
            self.texts[value.key] = self.count
            self.out += self.put()
        elif kind is dict:
            self.out += b"}("
            for key, item in value.items():
                self.plain(key)
                self.plain(item)
            self.out += b"u"
        elif kind is list:
            self.out += b"]("
            for item in value:
                self.plain(item)
            self.out += b"e"
        elif kind is PersistentId:
            self.out += b"("
            for part in (value.kind, value.cls):
                self.save(part)
            self.out += _unicode(value.key)
            self.save(value.location)
            self.out += _integer(value.numel) + b"tQ"
        elif kind is tuple:
            count = len(value)
            if count > 3:
                self.out += b"("
            for item in value:
                if type(item) is int:  # most are: shapes and strides
                    self.out += _integer(item)
                else:
                    self.plain(item)
            self.out += _TUPLES.get(count, b"t")
        elif kind is OrderedDict:
            self.named(_ORDERED)
            self.out += b")R"
        else:
            self.save(value)

    def tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.out += b")"
            return

        def finish() -> None:
            known = self.memo.get(id(value))
            if known is not None:  # it contains itself, and was saved with its elements
                self.out += b"0" * len(value) if len(value) <= 3 else b"1"
                self.out += self.get(known)
            else:
                self.out += _TUPLES.get(len(value), b"t") + self.remember(value)

        self.next(b"" if len(value) <= 3 else b"(", *map(_Save, value), finish)

    def text(self, value: str) -> None:
        number = self.texts.get(value)
        if number is not None:
            self.out += self.get(number)
            return
        self.texts[value] = self.count
        self.out += _unicode(value) + self.put()

    def named(self, value: Global) -> None:
        number = self.texts.get(value)
        if number is not None:
            self.out += self.get(number)
            return
        if not all(part.isprintable() for part in value):  # a newline would end the name and begin an opcode
            raise UnsupportedError(f"The name {str(value)[:100]!r} cannot be written into a pickle.")
        self.texts[value] = self.count
        self.out += b"c" + f"{value.module}\n{value.name}\n".encode() + self.put()


_ORDERED = Global("collections", "OrderedDict")
_ATOMS = frozenset((int, bool, str, Global, PersistentId, type(None)))


def _is_plain(value: Any, depth: int = 3) -> bool:
    """Return whether a call, or one of its arguments, has no part that may occur again elsewhere or contain itself."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is Call:
        alone = not value.states and value.appended == value.items == ()
        return alone and type(value.function) is Global and _is_plain(value.args, depth - 1)
    if kind is tuple:
        # A loop, as a generator for each tensor takes twice as long.
        for part in value if depth > 0 else ():
            if type(part) not in _ATOMS and not _is_plain(part, depth - 1):
                return False
        return depth > 0
    return kind is OrderedDict and not value and not vars(value)


class _Save(NamedTuple):
    value: Any


class _Once(NamedTuple):
    """A string that does not come again, and so is not stored in the memo."""

    text: str


_double = struct.Struct(">d").pack


def _unicode(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _batches(entries: Iterable[tuple[Any, ...]], single: bytes, many: bytes) -> Iterator[Any]:
    """Yield the steps that add `entries` to a container: opcode `single` for one entry, `many` for each batch."""
    batch: list[tuple[Any, ...]] = []
    for entry in entries:
        batch.append(entry)
        if len(batch) == _BATCH:
            yield from (b"(", *(_Save(value) for values in batch for value in values), many)
            batch = []
    if len(batch) == 1:
        yield from (*map(_Save, batch[0]), single)
    elif batch:
        yield from (b"(", *(_Save(value) for values in batch for value in values), many)


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a%c" % len(raw) if len(raw) < 256 else b"\x8b" + struct.pack("<I", len(raw))) + raw


# ------------------------------------------------------------------------------------------ the calls of each type


def _builtin(name: str) -> Global:
    return Global("__builtin__", name)


def _latin(data: bytes | bytearray) -> str:
    return bytes(data).decode("latin-1")


def _bytes(value: bytes) -> Call:
    return Call(Global("_codecs", "encode"), (_latin(value), "latin1")) if value else Call(_builtin("bytes"), ())


def _bytearray(value: bytearray) -> Call:
    return Call(_builtin("bytearray"), (_latin(value), "latin-1") if value else ())


def _deque(value: deque[Any]) -> Call:
    args = () if value.maxlen is None else ((), value.maxlen)
    return Call(Global("collections", "deque"), args, appended=value)


# Modules of types that may be a factory, by their Python 2 names, which protocol 2 uses.
_MODULES = {"builtins": "__builtin__", "collections": "collections"}


def _defaultdict(value: defaultdict[Any, Any]) -> Call:
    factory: Any = value.default_factory
    args = () if factory is None else (Global(_MODULES[factory.__module__], factory.__qualname__),)
    return Call(Global("collections", "defaultdict"), args, items=value.items())


def _attributes(value: Any) -> tuple[Any, ...]:
    """Return the attributes set on an object itself as its state; () if there are none."""
    return (vars(value),) if vars(value) else ()


def _ordered(value: OrderedDict[Any, Any]) -> Call:
    return Call(Global("collections", "OrderedDict"), (), states=_attributes(value), items=value.items())


def _constant(value: TorchConstant) -> Any:
    # torch would look others up.
    if not torch_constants.has(value):
        raise UnsupportedError(f"torch has no {value.kind[:40]!r} named {value.name[:40]!r} that can be written.")
    if value.kind == "device":
        name, _, index = value.name.partition(":")
        return Call(Global("torch", "device"), (name, int(index)) if index else (name,))
    if value.kind == "layout":
        return Call(Global("torch.serialization", "_get_layout"), (f"torch.{value.name}",))
    return Global("torch", value.name)


def _numpy_dtype(dtype: str) -> Call:
    notation = numpy_dtypes.parsed(dtype)
    if not notation or not notation.order or (notation.kind in "mM" and notation.order not in "<>"):
        raise UnsupportedError(f"A numpy value of dtype {dtype[:40]!r} cannot be written into a pickle.")
    order, kind, size, count, unit = notation
    named = Global("numpy", "dtype"), (f"{kind}{size}", False, True)
    if kind in "mM":
        counted = (None, ((unit or "generic").encode(), count, 1, 1))
        return Call(*named, states=((4, order, None, None, None, -1, -1, 0, counted),))
    element = notation.itemsize if kind in "SUV" else -1
    alignment = 4 if kind == "U" else 1 if element > 0 else -1
    return Call(*named, states=((3, order, None, None, None, element, alignment, 0),))


def _numpy_scalar(value: NumpyScalar) -> Call:
    return Call(Global("numpy.core.multiarray", "scalar"), (_numpy_dtype(value.dtype), value.data))


def _numpy_array(value: NumpyArray) -> Call:
    if value.dtype[0] == ">":
        # numpy would swap the bytes of big-endian data that it gets as a state.
        arguments = (bytearray(value.data), _numpy_dtype(value.dtype), value.shape, value.order)
        return Call(Global("numpy.core.numeric", "_frombuffer"), arguments)
    state = (1, value.shape, _numpy_dtype(value.dtype), value.order == "F", value.data)
    return Call(
        Global("numpy.core.multiarray", "_reconstruct"), (Global("numpy", "ndarray"), (0,), b"b"), states=(state,)
    )


_REDUCTIONS: dict[type, Callable[[Any], Any]] = {
    bytes: _bytes,
    bytearray: _bytearray,
    complex: lambda value: Call(_builtin("complex"), (value.real, value.imag)),
    set: lambda value: Call(_builtin("set"), (ordered(value),)),
    frozenset: lambda value: Call(_builtin("frozenset"), (ordered(value),)),
    range: lambda value: Call(_builtin("xrange"), (value.start, value.stop, value.step)),
    slice: lambda value: Call(_builtin("slice"), (value.start, value.stop, value.step)),
    type(...): lambda value: _builtin("Ellipsis"),
    deque: _deque,
    defaultdict: _defaultdict,
    OrderedDict: _ordered,
    Counter: lambda value: Call(Global("collections", "Counter"), (dict(value),), states=_attributes(value)),
    Size: lambda value: Call(Global("torch", "Size"), (tuple(value),)),
    TorchConstant: _constant,
    NumpyScalar: _numpy_scalar,
    NumpyArray: _numpy_array,
}


def _reduce(value: Any) -> Any:
    """Return the call that makes a value whose type has no opcode; None for unknown types."""
    reduction = _REDUCTIONS.get(type(value))
    return None if reduction is None else reduction(value)
