"""The inert pickle machine: reads a pickle into a plain tree, and runs nothing.

A pickle is a program for a small stack machine. Some of its instructions name a class or function, and others call
what was named; that is how loading a pickle with Python runs whatever its author liked. Here a name stays a name: it
is looked up, exactly, in tables of what is understood to be data (`Vocabulary`), and whatever is not there becomes an
`Opaque` node that remembers what it was to be made from. Nothing is imported, and nothing named in a pickle is called.

All opcodes of protocols 0 to 5 are understood, as documented in CPython's `Lib/pickletools.py`. Buffers outside the
pickle (protocol 5) and the extension registry need things that a file does not hold, and are refused.

Time and memory are proportional to the length of the pickle, whatever it says: no length or index in it is believed
before it is checked, and nothing recurses.
"""

from __future__ import annotations

import codecs
import itertools
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from . import attacks
from .errors import CkptconvError, CorruptError, LimitError, UnsupportedError
from .garbage import no_garbage
from .tensors import LazyTensor, Tagged
from .tree import Composite, Global, NumpyArray, NumpyScalar, Opaque, Size, TorchConstant

# Called with the arguments a pickle gives (all inert values, of any type and number, none to be trusted), returns the
# value, or NotImplemented if it has none for such arguments: the call is then kept as an `Opaque`. It may raise
# `MalformedError`. It can be called twice for the same part of a pickle.
Constructor: TypeAlias = Callable[[tuple[Any, ...]], Any]
# Called with an `Opaque` and the argument of a BUILD for it: returns what takes its place, or NotImplemented.
Builder: TypeAlias = Callable[[Opaque, Any], Any]
# Gives a value for the key of a storage, or None: then it is made in the usual way, opcode by opcode.
Maker: TypeAlias = Callable[[str], Any]


class Phrase(NamedTuple):
    """The call by which torch has a tensor made, but for the key of its storage.

    `function` is called with a storage, `offset`, `size`, `stride`, `flag`, and what a call of `hooks` gives; the
    storage is what is meant by the persistent id (`tag`, `cls`, the key, `location`, `numel`).
    """

    function: Any
    tag: Any
    cls: Any
    location: Any
    numel: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    flag: bool
    hooks: Any


@dataclass(frozen=True)
class Vocabulary:
    """What a pickle may name and mean as data, beyond Python's own containers.

    `constructors`: for a class or function, by exact module and name, what a call of it makes.
    `constants`: what a name stands for by itself.
    `builders`: what becomes of an `Opaque` of that class when it is given its state.
    `persistent`: what a persistent id stands for.
    `phrases`: what makes the same as the others would for a phrase, at once; None where there is no such thing.
    """

    constructors: Mapping[tuple[str, str], Constructor] = field(default_factory=dict)
    constants: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    builders: Mapping[tuple[str, str], Builder] = field(default_factory=dict)
    persistent: Callable[[Any], Any] | None = None
    phrases: Callable[[Phrase], Maker | None] | None = None


@dataclass(frozen=True)
class Limits:
    """More than any honest pickle needs. All else is bounded by the length of the pickle itself.

    `int_bytes`: size of an integer; beyond about 4,300 digits Python itself will not print one.
    `key_nodes`, `key_depth`: size of a dictionary key or set element, with shared parts counted each time they occur.
    `same_hash`: keys of one container that have the same hash (strings and bytes are hashed with a secret, and are
    not counted).
    `depth`: containers inside containers; whoever walks the tree may recurse. Python's pickler gives up below 1,000,
    unless it is told not to.
    `cyclic`: whether lists, dictionaries and the like may lead back to themselves, as objects may.
    """

    depth: int = 256
    int_bytes: int = 1785
    key_nodes: int = 10_000
    key_depth: int = 100
    same_hash: int = 64
    cyclic: bool = False


DEFAULT_LIMITS = Limits()
# For trees that are kept whole, by those who do not recurse.
WHOLE_TREES = Limits(depth=10_000, int_bytes=1 << 16, cyclic=True)


@dataclass(frozen=True)
class Loaded:
    """What a pickle says: its `value`; the position `end` after it; every class and function it mentions, in order
    of first mention; and of these, what was called and kept as `Opaque`."""

    value: Any
    end: int
    globals: tuple[Global, ...]
    opaque: tuple[Global, ...]


class TruncatedError(CorruptError):
    """The data ends before the pickle does."""


class MalformedError(Exception):
    """Raised inside the machine and by constructors: the reason only; the machine adds the file and the position."""


class ExcessiveError(MalformedError):
    """More than `Limits` allow."""


class RefusedError(MalformedError):
    """Something valid that cannot be read."""


def load(
    data: bytes | memoryview,
    vocabulary: Vocabulary = Vocabulary(),
    *,
    where: str,
    start: int = 0,
    limits: Limits = DEFAULT_LIMITS,
) -> Loaded:
    """Read the pickle that begins at byte `start` of `data`. `where` names it in errors.

    Raises TruncatedError where the data ends too early, CorruptError where it is not a valid pickle, LimitError where
    it asks for more than `limits`, and UnsupportedError for what only a running Python could provide; UnsafeError for
    an attack, where they are refused (`attacks.refused`), be it sound or not: some fire before the pickle breaks.
    """
    data = bytes(data)
    with no_garbage():
        try:
            return _run(_Machine(data, vocabulary, where, start, limits, lean=True))
        except _NotStoredError:
            return _run(_Machine(data, vocabulary, where, start, limits, lean=False))


def _run(machine: _Machine) -> Loaded:
    try:
        loaded = machine.run()
    except CkptconvError as error:
        # What is cut short is read again where it goes on.
        machine.refuse_attack(broken=not isinstance(error, TruncatedError))
        raise
    else:
        machine.refuse_attack()
        return loaded
    finally:
        # Its parts refer to one another: it, and the data, would be there until the next search for garbage.
        vars(machine).clear()


# ------------------------------------------------------------------------------------------------ keys and elements

_FREE = frozenset((str, bytes, bool, type(None), type(...), Opaque, Composite, NumpyArray))
_TUPLES = frozenset((tuple, Size, Global, TorchConstant, NumpyScalar, frozenset))
# Integers below this are their own hash.
_SMALL = 1 << 60
_DEQUES_DEEP = 100
# The memory of an empty one, in empty lists.
_SET_COST, _DEQUE_COST = 3, 8


class _Keys:
    """Admits keys to dictionaries and elements to sets, unless to hash or compare them would take unreasonably long.

    A tuple of two references to a tuple of two references to … is a few bytes in a pickle and takes forever to hash;
    keys with equal hashes make every insertion a search.
    """

    def __init__(self, limits: Limits, size: int) -> None:
        self.limits = limits
        # Hashes of tuples are not cached, and a reference to one costs two bytes: the sum is limited as well.
        self.budget = 1_000_000 + 4 * size
        # By identity of a container: the container (so that it stays the same one), and how often each hash occurred.
        self.seen: dict[int, tuple[Any, dict[int, int]]] = {}

    def admit(self, container: Any, key: Any) -> Any:
        """`key`, if it may become a key or element of `container`; an `Opaque` in place of a tensor."""
        kind = type(key)
        if kind in _FREE or (kind is int and -_SMALL < key < _SMALL):
            return key
        if isinstance(key, LazyTensor):
            # torch hashes tensors by identity.
            return Opaque(Global("torch", "Tensor"), (key,))
        self._spend(key)
        if key not in container:
            hashes = self.seen.setdefault(id(container), (container, {}))[1]
            code = hash(key)
            hashes[code] = count = hashes.get(code, 0) + 1
            if count > self.limits.same_hash:
                raise ExcessiveError(f"has more than {self.limits.same_hash} keys with the same hash in one container")
        return key

    def _spend(self, key: Any) -> None:
        nodes = 0
        level = [key]
        for _ in range(self.limits.key_depth):
            deeper: list[Any] = []
            nodes += len(level)
            for item in level:
                kind = type(item)
                if kind in _TUPLES:
                    deeper += item
                    if nodes + len(deeper) > self.limits.key_nodes:
                        break
                elif kind is int:
                    nodes += item.bit_length() >> 10
                elif kind is range:
                    deeper += (item.start, item.stop, item.step)
                elif kind not in _FREE and kind is not float and kind is not complex:
                    raise MalformedError(f"uses a value of type {kind.__name__} as a key")
            if nodes + len(deeper) > self.limits.key_nodes:
                raise ExcessiveError(f"has a key made of more than {self.limits.key_nodes} parts")
            if not deeper:
                break
            level = deeper
        else:
            raise ExcessiveError(f"has a key nested more than {self.limits.key_depth} levels deep")
        self.budget -= nodes
        if self.budget < 0:
            raise ExcessiveError("has keys that take too long to hash")

    def set_items(self, target: dict[Any, Any], items: list[Any]) -> None:
        """Put `items`, which are key, value, key, value …, into `target`."""
        names = items[::2]
        if set(map(type, names)) == {str}:
            target.update(zip(names, items[1::2], strict=True))
        else:
            self.fill(target, zip(names, items[1::2], strict=True))

    def fill(self, target: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> None:
        for key, value in pairs:
            target[key if type(key) is str else self.admit(target, key)] = value

    def set_of(self, items: Iterable[Any]) -> set[Any]:
        result: set[Any] = set()
        self.update(result, items)
        return result

    def update(self, target: set[Any], items: Iterable[Any]) -> None:
        for item in items:
            target.add(self.admit(target, item))


class _Deques:
    """Extends deques. Python frees a deque inside a deque by recursion in C, and crashes where there are too many."""

    def __init__(self, charge: Callable[[int], None]) -> None:
        self.charge = charge
        # By identity: how many deques are in one another, and which are inside another.
        self._levels: dict[int, int] = {}
        self._inner: set[int] = set()

    def extend(self, target: deque[Any], items: Iterable[Any]) -> None:
        for item in items:
            if type(item) is deque:
                levels = 1 + self._levels.get(id(item), 1)
                if levels > _DEQUES_DEEP:
                    raise ExcessiveError(f"has more than {_DEQUES_DEEP} deques inside one another")
                if id(target) in self._inner:
                    # No pickler does; the levels of the outer one would have to be counted anew.
                    raise MalformedError("adds a deque to a deque that is inside another already")
                self._levels[id(target)] = max(levels, self._levels.get(id(target), 1))
                self._inner.add(id(item))
        target.extend(items)


# ----------------------------------------------------------------------------------------- Python's own containers

_ATOMS = frozenset((type(None), bool, int, float, str, bytes))
_SEQUENCES = frozenset((list, tuple, set, frozenset, deque, Size))
# Modules of the builtins in Python 3 and 2. Their names at protocols 0 to 2 are Python 2's.
_BUILTINS = ("builtins", "__builtin__")
_LATIN1 = frozenset(("latin1", "latin-1", "iso-8859-1", "iso8859-1"))
_FACTORIES: dict[tuple[str, str], Any] = {
    (module, made.__name__): made
    for module in _BUILTINS
    for made in (list, dict, set, frozenset, tuple, int, float, bool, str, bytes, bytearray, complex)
} | {
    ("__builtin__", "long"): int,
    ("__builtin__", "unicode"): str,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
}
_CONSTANTS: dict[tuple[str, str], Any] = {(module, "Ellipsis"): ... for module in _BUILTINS}


def _pairs(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """What a dictionary can be made from: a dictionary, or a sequence of pairs."""
    if isinstance(value, dict):
        return value.items()
    if type(value) in (list, tuple) and all(type(pair) in (list, tuple) and len(pair) == 2 for pair in value):
        return value  # type: ignore[no-any-return]
    return None


def _mapping(made: Callable[[], dict[Any, Any]], keys: _Keys) -> Constructor:
    def construct(args: tuple[Any, ...]) -> Any:
        if not args:
            return made()
        pairs = _pairs(args[0]) if len(args) == 1 else None
        if pairs is None:
            return NotImplemented
        target = made()
        keys.fill(target, pairs)
        return target

    return construct


def _sequence(made: Callable[[Any], Any]) -> Constructor:
    def construct(args: tuple[Any, ...]) -> Any:
        if not args:
            return made(())
        return made(args[0]) if len(args) == 1 and type(args[0]) in _SEQUENCES else NotImplemented

    return construct


def _number(made: Callable[..., Any], kinds: tuple[type, ...]) -> Constructor:
    """A constructor of numbers from up to as many arguments as `made` takes, of exactly these types."""

    def construct(args: tuple[Any, ...]) -> Any:
        if any(type(arg) not in kinds for arg in args):
            return NotImplemented
        try:
            return made(*args)
        except (TypeError, ValueError, OverflowError):
            return NotImplemented

    return construct


def _slice(args: tuple[Any, ...]) -> Any:
    """slice(stop), slice(start, stop), slice(start, stop, step)."""
    return slice(*args) if 1 <= len(args) <= 3 and all(map(_can_be_sliced, args)) else NotImplemented


def _can_be_sliced(value: Any, levels: int = 4) -> bool:
    """Whether a slice of `value` is harmless: Python frees slices, as it does deques, by recursion in C."""
    if type(value) is slice:
        return levels > 0 and all(_can_be_sliced(part, levels - 1) for part in (value.start, value.stop, value.step))
    return type(value) is not deque


def _bytes(args: tuple[Any, ...]) -> Any:
    """bytes() or bytes(b"…"); never bytes(n), which would allocate what a few digits ask for."""
    if not args:
        return b""
    if len(args) == 1 and type(args[0]) in (bytes, bytearray):
        return bytes(args[0])
    return _encoded(args)


def _encoded(args: tuple[Any, ...]) -> Any:
    """The encoding of text that carries bytes in protocols without them."""
    if len(args) != 2 or type(args[0]) is not str or type(args[1]) is not str or args[1].lower() not in _LATIN1:
        return NotImplemented
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        raise MalformedError("encodes text as bytes that has characters above U+00FF") from None


def _bytearray(args: tuple[Any, ...]) -> Any:
    data = _bytes(args)
    return NotImplemented if data is NotImplemented else bytearray(data)


def _deque(args: tuple[Any, ...], deques: _Deques) -> Any:
    """deque(), deque(items), deque(items, maxlen)."""
    if len(args) > 2:
        return NotImplemented
    items, maxlen = (*args, None)[:2] if args else ((), None)
    if type(items) not in _SEQUENCES or not (maxlen is None or (type(maxlen) is int and 0 <= maxlen < 1 << 62)):
        return NotImplemented
    deques.charge(_DEQUE_COST)
    made: deque[Any] = deque(maxlen=maxlen)
    deques.extend(made, items)
    return made


def _defaultdict(args: tuple[Any, ...], keys: _Keys) -> Any:
    """defaultdict(), defaultdict(factory), defaultdict(factory, pairs); the factory a builtin type or None."""
    factory = args[0] if args else None
    if factory is not None:
        factory = _FACTORIES.get(factory) if type(factory) is Global else None
        if factory is None:
            return NotImplemented
    pairs = _pairs(args[1]) if len(args) == 2 else ()
    if pairs is None or len(args) > 2:
        return NotImplemented
    target: defaultdict[Any, Any] = defaultdict(factory)
    keys.fill(target, pairs)
    return target


def _python(keys: _Keys, deques: _Deques) -> dict[tuple[str, str], Constructor]:
    """The constructors of what Python itself has."""

    def set_of(args: tuple[Any, ...]) -> Any:
        made = sequence(args)
        return NotImplemented if made is NotImplemented else keys.set_of(made)

    def frozenset_of(args: tuple[Any, ...]) -> Any:
        made = set_of(args)
        return NotImplemented if made is NotImplemented else frozenset(made)

    sequence = _sequence(tuple)
    builtins: dict[str, Constructor] = {
        "dict": _mapping(dict, keys),
        "list": _sequence(list),
        "tuple": sequence,
        "set": set_of,
        "frozenset": frozenset_of,
        "bytes": _bytes,
        "bytearray": _bytearray,
        "str": lambda args: "".join(args) if len(args) < 2 and all(type(a) is str for a in args) else NotImplemented,
        "bool": _number(bool, (bool, int, float)),
        "int": _number(int, (bool, int)),
        "float": _number(float, (float, int, str)),
        "complex": _number(complex, (float, int, complex)),
        "range": _number(range, (int, bool)),
        "slice": _slice,
    }
    named: dict[tuple[str, str], Constructor] = {
        (module, name): made for module in _BUILTINS for name, made in builtins.items()
    }
    named |= {
        ("__builtin__", "long"): builtins["int"],
        ("__builtin__", "xrange"): builtins["range"],
        ("__builtin__", "unicode"): builtins["str"],
        ("_codecs", "encode"): _encoded,
        ("collections", "OrderedDict"): _mapping(OrderedDict, keys),
        ("collections", "Counter"): _mapping(Counter, keys),
        ("collections", "deque"): lambda args: _deque(args, deques),
        ("collections", "defaultdict"): lambda args: _defaultdict(args, keys),
    }
    return named


# --------------------------------------------------------------------------------------------------------- phrases

_GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....)"
_PUT = rb"((?:r....)|)"
_INTS = rb"(\)|%(i)b\x85|%(i)b%(i)b\x86|%(i)b%(i)b%(i)b\x87|\((?:%(i)b){0,64}t)" % {b"i": _INT}
# What torch.save writes for a tensor after the function that makes it, once the memo has 256 entries: at one match
# what would be 25 opcodes. Groups of what is the same for many tensors, and of the places in the memo, alternate.
_PHRASE = re.compile(
    rb"\(\((%(get)b%(get)bX.\0\0\0)([0-9]{1,20})(r....)(%(get)b|X.\0\0\0[a-z]{1,16}(?::[0-9]{1,4})?)%(put)b(%(int)b)t(r....)Q"
    rb"(%(int)b)%(ints)b%(put)b%(ints)b%(put)b([\x88\x89])(%(get)b)\)R(r....)t(r....)R(r....)"
    % {b"get": _GET, b"put": _PUT, b"int": _INT, b"ints": _INTS},
    re.DOTALL,
).match
_KIND = (1, 4, 6, 8, 9, 11, 13, 14)
_PUTS = (3, 5, 7, 10, 12, 15, 16, 17)
_KEY = 2
_PIECES = re.compile(rb"K(.)|M(..)|J(....)", re.DOTALL)
# As numbers, by their length: so many LONG_BINPUTs from place 0 on, and what each place more adds.
_FIRST_PUTS = {5 * n: sum((0x72 | at << 8) << 40 * at for at in range(n)) for n in range(9)}
_NEXT_PUTS = {5 * n: sum(1 << 40 * at + 8 for at in range(n)) for n in range(9)}
_GETS = re.compile(rb"h(.)|j(....)", re.DOTALL)
_KINDS_KEPT = 4096


def _in_order(puts: bytes, first: int) -> bool:
    """Whether LONG_BINPUTs are to one place after the other, from `first` on."""
    return int.from_bytes(puts, "little") == _FIRST_PUTS[len(puts)] + first * _NEXT_PUTS[len(puts)]


def _ints(opcodes: bytes) -> tuple[int, ...]:
    """The integers that BININT1, BININT2 and BININT push."""
    found = _PIECES.findall(opcodes)
    return tuple(int.from_bytes(a or b or c, "little", signed=bool(c)) for a, b, c in found)


class _Kind(NamedTuple):
    """Tensors that are alike: the function that a pickle calls for them, what makes them instead, how long the key of
    their storage is, and the storage's location."""

    function: Any
    make: Maker
    length: int
    location: Any


# --------------------------------------------------------------------------------------------------------- machine


class _NotStoredError(Exception):
    """The pickle refers to something that was not remembered, in the hope that it would not."""


_HOLE: Any = object()
# By the length of the LONG_BINPUTs of a phrase, for all but the first and the last.
_HOLES = {5 * n: [_HOLE] * (n - 2) for n in range(2, 9)}
_BUILT_IN_PLACE = (OrderedDict, Counter)
_OBJECTS = tuple(Global(module, "object") for module in _BUILTINS)
# An object made by calling the result of a call of the result of a call …
_CALL_DEPTH = 16
# How far back the memo is searched for an object that BUILD has replaced: arrays of numpy need a dozen places.
_REPLACED_WITHIN = 64
# A tuple followed by one of these is hardly ever referred to again: REDUCE and BINPERSID (it is the arguments of a
# call, or an id), and numbers, bools and tuples (it is the size or stride of a tensor).
_AFTER_TUPLES = frozenset(b"RQKMJ()\x88\x89")

_u16 = struct.Struct("<H").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_f64 = struct.Struct(">d").unpack_from


class _Machine:
    """One run over one pickle.

    A lean run does not remember what Python's own pickler always offers for reference and hardly ever refers to: the
    tuples that say what a tensor is, and the empty OrderedDict of its hooks. For a file of a million tensors that is
    most of the memory. Should a pickle refer to one after all, it is read again with a full memo.
    """

    def __init__(
        self, data: bytes, vocabulary: Vocabulary, where: str, start: int, limits: Limits, *, lean: bool
    ) -> None:
        self.data = data
        self.pos = self.start = start
        self.short = False
        self.where = where
        self.limits = limits
        self.lean = lean
        self.keys = _Keys(limits, len(data) - start)
        self.deques = _Deques(self.charge)
        self.constructors: dict[Any, Constructor] = {**_python(self.keys, self.deques), **vocabulary.constructors}
        self.constants: dict[Any, Any] = {**_CONSTANTS, **vocabulary.constants}
        self.builders: Mapping[Any, Builder] = vocabulary.builders
        self.persistent = vocabulary.persistent or self._opaque_persistent
        # How many more containers and objects may be made. Empty ones are a byte or two each, and take hundreds.
        self.room = 1_000_000 + (len(data) - start) // 4
        self.stack: list[Any] = []
        # Stacks below the marks; MARK starts a new stack.
        self.marks: list[list[Any]] = []
        # Entries come numbered in order, so a list holds them; others, which may have any number, go to `spill`.
        self.memo: list[Any] = []
        self.spill: dict[int, Any] = {}
        self.globals: dict[Global, Global] = {}
        self.opaque: dict[Global, None] = {}
        self.suspects: dict[Global, None] = {}
        # By how a pickle spells them. What it spells depends on the memo.
        self.phrases = vocabulary.phrases
        self.kinds: dict[tuple[bytes, ...], _Kind | None] = {}

    # ---- running

    def run(self) -> Loaded:
        """Read the pickle, and turn whatever is wrong with it into an error that names the place."""
        try:
            value = self._loop()
            self.memo.clear()
            # Shared parts are few bytes each time they are referred to.
            _check_nesting(value, self.limits, 1_000_000 + 16 * (self.pos - self.start))
        except _NotStoredError:
            if self.lean:
                raise
            raise self._error(CorruptError, "refers to an object that it has not stored") from None
        except ExcessiveError as reason:
            raise self._error(LimitError, str(reason)) from None
        except RefusedError as reason:
            raise self._error(UnsupportedError, str(reason)) from None
        except MalformedError as reason:
            raise self._error(CorruptError, str(reason)) from None
        except (IndexError, struct.error) as error:
            # A struct is only ever short of data; a list is short of what the pickle never put there.
            if isinstance(error, struct.error) or self.short or self.pos >= len(self.data):
                size = len(self.data) - self.start
                raise self._error(TruncatedError, f"ends after {size} bytes, unfinished") from None
            raise self._error(CorruptError, "takes from the stack what is not there") from None
        return Loaded(value, self.pos, tuple(self.globals), tuple(self.opaque))

    def refuse_attack(self, *, broken: bool = False) -> None:
        """Raise UnsafeError if what was read so far is an attack, where those are refused."""
        if self.suspects and (self.opaque or broken) and attacks.are_refused():
            raise attacks.error(self.where, self.suspects, self.opaque) from None

    def _error(self, kind: type[CorruptError] | type[UnsupportedError], reason: str) -> CorruptError | UnsupportedError:
        return kind(f"{self.where}: the pickle {reason} (at byte {min(self.pos, len(self.data))}).")

    def _loop(self) -> Any:
        """The opcodes that make up nearly all of a checkpoint, most frequent first; the others are in `_RARE`."""
        data, pos, size, lean = self.data, self.pos, len(self.data), self.lean
        stack, marks, memo = self.stack, self.marks, self.memo
        u32, i32 = _u32, _i32
        call, rare = self.call, _RARE
        try:
            while True:
                op = data[pos]
                pos += 1
                if 0x71 <= op <= 0x72:  # BINPUT, LONG_BINPUT
                    if op == 0x72:
                        index = u32(data, pos)[0]
                        pos += 4
                    else:
                        index = data[pos]
                        pos += 1
                    value = stack[-1]
                    if lean:
                        after = data[pos]
                        if type(value) is tuple:
                            if after in _AFTER_TUPLES:
                                value = _HOLE
                        elif after == 0x74 and type(value) is OrderedDict:
                            value = _HOLE
                    if index == len(memo):
                        memo.append(value)
                    else:
                        self._put(index, value)
                elif op == 0x68:  # BINGET
                    index = data[pos]
                    pos += 1
                    value = memo[index] if index < len(memo) else self.get(index)
                    if value is _HOLE:
                        raise _NotStoredError
                    stack.append(value)
                elif op == 0x28:  # MARK
                    if lean and data.startswith(b"(", pos) and stack:
                        end = self._phrase(pos - 1, stack)
                        if end:
                            pos = end
                            continue
                    marks.append(stack)
                    stack = []
                elif op == 0x4B:  # BININT1
                    stack.append(data[pos])
                    pos += 1
                elif op == 0x58:  # BINUNICODE
                    end = pos + 4 + u32(data, pos)[0]
                    if end > size:
                        raise self._short()
                    stack.append(str(data[pos + 4 : end], "utf-8", "surrogatepass"))
                    pos = end
                elif op == 0x52:  # REDUCE
                    args = stack.pop()
                    stack[-1] = call(stack[-1], args, "reduce")
                elif op == 0x74:  # TUPLE
                    items = tuple(stack)
                    stack = marks.pop()
                    stack.append(items)
                elif op == 0x4A:  # BININT
                    stack.append(i32(data, pos)[0])
                    pos += 4
                elif op == 0x86:  # TUPLE2
                    second = stack.pop()
                    stack[-1] = (stack[-1], second)
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                elif op == 0x89:  # NEWFALSE
                    stack.append(False)
                elif op == 0x29:  # EMPTY_TUPLE
                    stack.append(())
                elif op == 0x4D:  # BININT2
                    stack.append(_u16(data, pos)[0])
                    pos += 2
                elif op == 0x51:  # BINPERSID
                    stack[-1] = self.persistent(stack[-1])
                elif op == 0x6A:  # LONG_BINGET
                    stack.append(self.get(u32(data, pos)[0]))
                    pos += 4
                elif op == 0x8C:  # SHORT_BINUNICODE
                    end = pos + 1 + data[pos]
                    if end > size:
                        raise self._short()
                    stack.append(str(data[pos + 1 : end], "utf-8", "surrogatepass"))
                    pos = end
                elif op == 0x94:  # MEMOIZE
                    value = stack[-1]
                    if lean:
                        after = data[pos]
                        if type(value) is tuple:
                            if after in _AFTER_TUPLES:
                                value = _HOLE
                        elif after == 0x74 and type(value) is OrderedDict:
                            value = _HOLE
                    if self.spill:
                        self._put(len(memo) + len(self.spill), value)
                    else:
                        memo.append(value)
                elif op == 0x7D:  # EMPTY_DICT
                    self.charge(1)
                    stack.append({})
                elif op == 0x73:  # SETITEM
                    value = stack.pop()
                    key = stack.pop()
                    target = stack[-1]
                    if type(target) is dict and type(key) is str:
                        target[key] = value
                    else:
                        self._set_items(target, [key, value])
                elif op == 0x75:  # SETITEMS
                    items_list = stack
                    stack = marks.pop()
                    self._set_items(stack[-1], items_list)
                elif op == 0x4E:  # NONE
                    stack.append(None)
                elif op == 0x88:  # NEWTRUE
                    stack.append(True)
                elif op == 0x5D:  # EMPTY_LIST
                    self.charge(1)
                    stack.append([])
                elif op == 0x61:  # APPEND
                    value = stack.pop()
                    self._append(stack[-1], [value])
                elif op == 0x65:  # APPENDS
                    items_list = stack
                    stack = marks.pop()
                    self._append(stack[-1], items_list)
                elif op == 0x47:  # BINFLOAT
                    stack.append(_f64(data, pos)[0])
                    pos += 8
                elif op == 0x87:  # TUPLE3
                    stack[-3:] = ((stack[-3], stack[-2], stack[-1]),)
                elif op == 0x2E:  # STOP
                    if not stack:
                        raise MalformedError("has no value")
                    return stack.pop()
                else:
                    act = rare.get(op)
                    if act is None:
                        raise MalformedError(f"has an unknown opcode 0x{op:02x}")
                    self.pos, self.stack = pos, stack
                    act(self)
                    pos, stack = self.pos, self.stack
        except UnicodeDecodeError:
            raise MalformedError("has text that is not UTF-8") from None
        finally:
            self.pos = pos

    def _phrase(self, start: int, stack: list[Any]) -> int:
        """Make the tensor of the phrase at `start`, of the function on top of the stack, and say where the phrase ends;
        0 if there is none, or none that can be made at once."""
        found = None if self.spill else _PHRASE(self.data, start)
        if found is None:
            return 0
        spelled = found.group(*_KIND)
        if spelled in self.kinds:
            kind = self.kinds[spelled]
        else:
            if len(self.kinds) == _KINDS_KEPT:
                self.kinds.clear()
            kind = self.kinds[spelled] = self._kind(stack[-1], *spelled)
        memo = self.memo
        puts = found.group(*_PUTS)
        together = b"".join(puts)
        key = str(found[_KEY], "ascii")
        if kind is None or kind.function is not stack[-1] or len(key) != kind.length:
            return 0
        if not _in_order(together, len(memo)):
            return 0
        made = kind.make(key)
        if made is None:
            return 0
        self.charge(2)
        memo.append(key)
        if puts[1]:
            memo.append(kind.location)
        # What a lean run does not remember: the id, the size and stride unless they are empty, hooks, and arguments.
        memo += _HOLES[len(together) - len(puts[1])]
        memo.append(made)
        stack[-1] = made
        return found.end()

    def _kind(
        self,
        function: Any,
        head: bytes,
        location: bytes,
        numel: bytes,
        offset: bytes,
        size: bytes,
        stride: bytes,
        flag: bytes,
        hooks: bytes,
    ) -> _Kind | None:
        """What makes tensors that are spelled so, if anything does."""
        tag, cls = self._recalled(head[:-5])
        (made_of,) = self._recalled(hooks)
        if location.startswith(b"X"):
            where: Any = str(location[5:], "ascii") if location[1] == len(location) - 5 else None
        else:
            (where,) = self._recalled(location)
        if self.phrases is None or any(each is _HOLE for each in (tag, cls, where, made_of)):
            return None
        (count,), (first,) = _ints(numel), _ints(offset)
        phrase = Phrase(function, tag, cls, where, count, first, _ints(size), _ints(stride), flag == b"\x88", made_of)
        make = self.phrases(phrase)
        return None if make is None else _Kind(function, make, head[-4], where)

    # ---- parts of opcodes

    def _short(self) -> Exception:
        """To raise where a length goes beyond the data."""
        self.short = True
        return IndexError()

    def charge(self, count: int) -> None:
        """Count what is made, larger things several times."""
        self.room -= count
        if self.room < 0:
            raise ExcessiveError("makes more objects than its length can be about")

    def take(self, length: int) -> bytes:
        """The next `length` bytes of the pickle."""
        part = self.data[self.pos : self.pos + length]
        if length < 0:
            raise MalformedError("has a negative length")
        if len(part) != length:
            raise self._short()
        self.pos += length
        return part

    def number(self, unpack: Callable[[bytes, int], tuple[Any, ...]], size: int) -> Any:
        value = unpack(self.data, self.pos)[0]
        self.pos += size
        return value

    def line(self) -> bytes:
        """The next line, without its end."""
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            raise self._short()
        line = self.data[self.pos : end]
        self.pos = end + 1
        return line

    def above_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def _put(self, index: int, value: Any) -> None:
        memo = self.memo
        if index < len(memo):
            memo[index] = value
            self.kinds.clear()
        elif index == len(memo):
            self.spill.pop(index, None)
            memo.append(value)
        else:
            self.spill[index] = value

    def get(self, index: int) -> Any:
        value = self.memo[index] if 0 <= index < len(self.memo) else self.spill.get(index, _HOLE)
        if value is _HOLE:
            raise _NotStoredError
        return value

    def _recalled(self, gets: bytes) -> list[Any]:
        """What BINGET and LONG_BINGET push, or a hole."""
        memo = self.memo
        places = (int.from_bytes(short or long, "little") for short, long in _GETS.findall(gets))
        return [memo[place] if place < len(memo) else _HOLE for place in places]

    def find(self, module: Any, name: Any) -> Any:
        """What a name stands for: a constant, or just its name."""
        if type(module) is not str or type(name) is not str:
            raise MalformedError("names a class by something that is not text")
        mentioned = Global(module, name)
        known = self.globals.get(mentioned)
        if known is None:
            self.globals[mentioned] = known = mentioned
            if attacks.is_suspect(mentioned):
                self.suspects[mentioned] = None
        return self.constants.get(known, known)

    def call(self, function: Any, args: Any, how: str, kwargs: dict[str, Any] | None = None) -> Any:
        """The value of a call, or an `Opaque` that remembers it."""
        self.charge(1)
        if type(args) is not tuple:
            if not isinstance(args, tuple):
                raise MalformedError("calls something with arguments that are not a tuple")
            args = tuple(args)
        if type(function) is Global:
            construct = self.constructors.get(function)
            if construct is not None:
                value = construct(args) if not kwargs else NotImplemented
                if value is not NotImplemented:
                    return value
            elif function.module in ("copyreg", "copy_reg"):
                direct = _as_newobj(function.name, args)
                if direct is not None:
                    return self.call(direct[0], direct[1], "newobj_ex" if direct[2] else "newobj", direct[2])
            self.opaque[function] = None
            self.suspects.update(dict.fromkeys(attacks.ways_out(function, args)))
        elif type(function) is Opaque:
            inner: Any = function
            for _ in range(_CALL_DEPTH):
                if type(inner) is not Opaque:
                    break
                inner = inner.cls
            else:
                raise ExcessiveError(f"calls the result of a call, more than {_CALL_DEPTH} times over")
        else:
            raise MalformedError(f"calls a value of type {type(function).__name__}")
        return Opaque(function, args, kwargs, how)

    def build(self, state: Any) -> None:
        """Give the object on top of the stack its state."""
        target = self.stack[-1]
        kind = type(target)
        if kind is Opaque:
            builder = self.builders.get(target.cls) if type(target.cls) is Global else None
            value = builder(target, state) if builder else NotImplemented
            if value is NotImplemented:
                target.state.append(state)
                if builder:
                    self.opaque[target.cls] = None
            else:
                self._replace(target, value)
        elif kind in _BUILT_IN_PLACE:
            if type(state) is tuple and len(state) == 2 and state[1] is None:
                state = state[0]
            if type(state) is not dict:
                raise MalformedError(f"gives a value of type {kind.__name__} a state that is not a dictionary")
            for name in state:
                # Nor is `__setstate__` one: Python would call it with the next state.
                if type(name) is not str or hasattr(kind, name) or name.startswith("__"):
                    raise MalformedError(f"sets attribute {str(name)[:100]!r} of a value of type {kind.__name__}")
            target.__dict__.update(state)
        else:
            raise MalformedError(f"gives a state to a value of type {kind.__name__}")

    def _replace(self, old: Any, new: Any) -> None:
        """Put `new` where `old` is: on the stack, and in the memo if it was stored not long ago."""
        self.stack[-1] = new
        self.kinds.clear()
        memo = self.memo
        for index in range(len(memo) - 1, max(len(memo) - 1 - _REPLACED_WITHIN, -1), -1):
            if memo[index] is old:
                memo[index] = new
                return
        for index in reversed(self.spill):
            if self.spill[index] is old:
                self.spill[index] = new
                return

    def _set_items(self, target: Any, items: list[Any]) -> None:
        """SETITEM, SETITEMS: `items` is key, value, key, value …"""
        if len(items) % 2:
            raise MalformedError("sets a key without a value")
        if isinstance(target, dict):
            self.keys.set_items(target, items)
        elif type(target) is Opaque:
            target.items.extend(zip(items[::2], items[1::2], strict=True))
        else:
            raise MalformedError(f"sets an item of a value of type {type(target).__name__}")

    def _append(self, target: Any, items: list[Any]) -> None:
        if type(target) is list:
            target.extend(items)
        elif type(target) is deque:
            self.deques.extend(target, items)
        elif type(target) is Opaque:
            target.appended.extend(items)
        else:
            raise MalformedError(f"appends to a value of type {type(target).__name__}")

    def _opaque_persistent(self, pid: Any) -> Any:
        return Opaque(Global("pickle", "persistent_load"), pid, None, "persistent")


def _as_newobj(name: str, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any] | None] | None:
    """The class, arguments and keywords of an object that protocols 0 and 1 make through a helper of `copyreg`."""
    if name == "_reconstructor" and len(args) == 3 and args[1] in _OBJECTS and args[2] is None:
        made, given, kwargs = args[0], (), None
    elif name == "__newobj__" and args:
        made, given, kwargs = args[0], args[1:], None
    elif name == "__newobj_ex__" and len(args) == 3 and type(args[1]) is tuple and _is_kwargs(args[2]):
        made, given, kwargs = args
    else:
        return None
    return (made, given, kwargs) if type(made) is Global and made.module not in ("copyreg", "copy_reg") else None


def _is_kwargs(value: Any) -> bool:
    return type(value) is dict and all(type(name) is str for name in value)


# --------------------------------------------------------------------------------------------------------- nesting


# Smaller containers are walked again when they come again; there may be a million of them.
_WORTH_KEEPING = 16


def _mapped(container: dict[Any, Any]) -> Iterable[Any]:
    attributes = getattr(container, "__dict__", None)
    return itertools.chain(container.values(), (attributes,)) if attributes else container.values()


_CHILDREN: dict[type, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys((dict, defaultdict, OrderedDict, Counter), _mapped),
    **dict.fromkeys((list, tuple, deque, set, frozenset), lambda container: container),
    Opaque: lambda opaque: (
        opaque.cls,
        opaque.args,
        opaque.kwargs,
        *opaque.state,
        *opaque.appended,
        *itertools.chain.from_iterable(opaque.items),
    ),
    Composite: lambda composite: composite.parts.values(),
    slice: lambda bounds: (bounds.start, bounds.stop, bounds.step),
    Tagged: lambda tensor: (tensor.facts.attributes,),
}


def _check_nesting(value: Any, limits: Limits, most: int) -> None:
    """Check that a walk over the tree that goes into shared parts each time comes to an end, soon, and not too deep.

    Objects, which have an identity, may lead back to themselves: whoever walks looks out for them. Other containers
    may if `limits` say so.
    """
    deepest = limits.depth
    # By identity, of containers that are finished: nodes inside, counted each time, and levels.
    finished: dict[int, tuple[int, int]] = {}
    unfinished: set[int] = set()
    # The containers we are in, outermost first: itself, its children yet to come, its nodes, its levels.
    path: list[list[Any]] = []
    child = value
    while True:
        # Go into `child`, and then on with its children, until one is a container not yet seen.
        if type(child) in _CHILDREN:
            unfinished.add(id(child))
            path.append([child, iter(_CHILDREN[type(child)](child)), 1, 1])
            if len(path) > deepest:
                raise ExcessiveError(f"is nested more than {deepest} levels deep")
        while path:
            container, children, nodes, levels = path[-1]
            for child in children:
                nodes += 1
                kind = type(child)
                if kind in _CHILDREN and (kind is not Tagged or child.facts.attributes is not None):
                    known = finished.get(id(child))
                    if known:
                        nodes += known[0]
                        levels = max(levels, known[1] + 1)
                        if len(path) + known[1] > deepest:
                            raise ExcessiveError(f"is nested more than {deepest} levels deep")
                    elif id(child) not in unfinished:
                        break
                    elif kind is not Opaque and not limits.cyclic:
                        raise MalformedError(f"makes a {kind.__name__} that contains itself")
            else:
                path.pop()
                unfinished.remove(id(container))
                if nodes > _WORTH_KEEPING:
                    finished[id(container)] = nodes, levels
                if path:
                    path[-1][2] += nodes
                    path[-1][3] = max(path[-1][3], levels + 1)
                if nodes > most:
                    raise ExcessiveError(f"describes more than {most} values by referring to the same again and again")
                continue
            path[-1][2:] = nodes, levels
            break
        else:
            return


# ----------------------------------------------------------------------------------------------------- rare opcodes


def _push(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    """An opcode that pushes what `make` reads."""

    def act(machine: _Machine) -> None:
        value = make(machine)  # which may leave another stack
        machine.stack.append(value)

    return act


def _top(change: Callable[[_Machine, Any], None]) -> Callable[[_Machine], None]:
    """An opcode that pops one value and does something with it."""

    def act(machine: _Machine) -> None:
        change(machine, machine.stack.pop())

    return act


def _proto(machine: _Machine) -> None:
    version = machine.take(1)[0]
    if version > 5:
        raise RefusedError(f"is of protocol {version}; 0 to 5 are known")


def _frame(machine: _Machine) -> None:
    length = machine.number(_u64, 8)
    if length > len(machine.data) - machine.pos:
        raise machine._short()


def _global(machine: _Machine) -> Any:
    module = machine.line()
    return machine.find(str(module, "utf-8"), str(machine.line(), "utf-8"))


def _stack_global(machine: _Machine) -> None:
    name = machine.stack.pop()
    machine.stack[-1] = machine.find(machine.stack[-1], name)


def _inst(machine: _Machine) -> None:
    made = _global(machine)
    args = machine.above_mark()
    machine.stack.append(machine.call(made, tuple(args), "reduce"))


def _obj(machine: _Machine) -> None:
    made, *args = machine.above_mark() or [None]
    machine.stack.append(machine.call(made, tuple(args), "reduce"))


def _newobj(machine: _Machine) -> None:
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], args, "newobj")


def _newobj_ex(machine: _Machine) -> None:
    kwargs = machine.stack.pop()
    args = machine.stack.pop()
    if not _is_kwargs(kwargs):
        raise MalformedError("makes an object with keywords that are not a dictionary")
    machine.stack[-1] = machine.call(machine.stack[-1], args, "newobj_ex", kwargs)


def _pop(machine: _Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.above_mark()


def _dict(machine: _Machine) -> None:
    items = machine.above_mark()
    made: dict[Any, Any] = {}
    machine._set_items(made, items)
    machine.stack.append(made)


def _empty_set(machine: _Machine) -> None:
    machine.charge(_SET_COST)
    machine.stack.append(set())


def _add_items(machine: _Machine) -> None:
    items = machine.above_mark()
    target = machine.stack[-1]
    if type(target) is set:
        machine.keys.update(target, items)
    elif type(target) is Opaque:
        target.appended.extend(items)
    else:
        raise MalformedError(f"adds elements to a value of type {type(target).__name__}")


def _checked(machine: _Machine, length: int) -> int:
    if length > machine.limits.int_bytes:
        raise ExcessiveError(f"has an integer of {length} bytes")
    return length


def _long(machine: _Machine, length: int) -> int:
    return int.from_bytes(machine.take(_checked(machine, length)), "little", signed=True)


def _digits(machine: _Machine, line: bytes) -> int:
    # A byte is 2.4 digits.
    if len(line) > machine.limits.int_bytes * 12 // 5:
        raise ExcessiveError(f"has an integer of {len(line)} digits")
    try:
        return int(line, 0) if line != b"" else int(b"x")
    except ValueError:
        raise MalformedError(f"has {str(line[:40])[1:]} where a number should be") from None


def _int(machine: _Machine) -> Any:
    line = machine.line()
    return {b"00": False, b"01": True}[line] if line in (b"00", b"01") else _digits(machine, line)


def _text_float(machine: _Machine) -> float:
    line = machine.line()
    try:
        return float(line)
    except ValueError:
        raise MalformedError(f"has {str(line[:40])[1:]} where a number should be") from None


def _text_index(machine: _Machine) -> int:
    index = _digits(machine, machine.line())
    if index < 0:
        raise MalformedError("has a negative index")
    return index


def _python2(data: bytes) -> Any:
    """A string of Python 2, which is text or bytes; torch.load takes it for UTF-8."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


def _string(machine: _Machine) -> Any:
    line = machine.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise MalformedError("has a string without quotes")
    try:
        return _python2(codecs.escape_decode(line[1:-1])[0])
    except ValueError:
        raise MalformedError("has a string with an invalid escape") from None


def _unicode(machine: _Machine) -> str:
    return str(machine.line(), "raw-unicode-escape")


def _persid(machine: _Machine) -> Any:
    return machine.persistent(str(machine.line(), "utf-8"))


def _refuse(reason: str) -> Callable[[_Machine], None]:
    def act(machine: _Machine) -> None:
        raise RefusedError(reason)

    return act


_EXTENSION = _refuse("names a class by a number of the extension registry of the Python that wrote it")
_BUFFER = _refuse("needs a buffer that was kept outside it")

_RARE: dict[int, Callable[[_Machine], None]] = {
    0x80: _proto,
    0x95: _frame,
    # names and objects
    ord("c"): _push(_global),
    0x93: _stack_global,
    ord("i"): _inst,
    ord("o"): _obj,
    0x81: _newobj,
    0x92: _newobj_ex,
    ord("b"): _top(_Machine.build),
    ord("P"): _push(_persid),
    0x82: _EXTENSION,
    0x83: _EXTENSION,
    0x84: _EXTENSION,
    # containers
    ord("l"): _push(lambda m: m.above_mark()),
    ord("d"): _dict,
    0x8F: _empty_set,
    0x90: _add_items,
    0x91: _push(lambda m: frozenset(m.keys.set_of(m.above_mark()))),
    # numbers
    ord("I"): _push(_int),
    ord("L"): _push(lambda m: _digits(m, m.line().removesuffix(b"L"))),
    0x8A: _push(lambda m: _long(m, m.take(1)[0])),
    0x8B: _push(lambda m: _long(m, m.number(_i32, 4))),
    ord("F"): _push(_text_float),
    # text and bytes
    ord("V"): _push(_unicode),
    0x8D: _push(lambda m: str(m.take(m.number(_u64, 8)), "utf-8", "surrogatepass")),
    ord("S"): _push(_string),
    ord("T"): _push(lambda m: _python2(m.take(m.number(_i32, 4)))),
    ord("U"): _push(lambda m: _python2(m.take(m.take(1)[0]))),
    ord("B"): _push(lambda m: m.take(m.number(_u32, 4))),
    ord("C"): _push(lambda m: m.take(m.take(1)[0])),
    0x8E: _push(lambda m: m.take(m.number(_u64, 8))),
    0x96: _push(lambda m: bytearray(m.take(m.number(_u64, 8)))),
    0x97: _BUFFER,
    0x98: _BUFFER,
    # stack and memo
    ord("0"): _pop,
    ord("1"): lambda m: m.above_mark().clear(),
    ord("2"): _push(lambda m: m.stack[-1]),
    ord("g"): _push(lambda m: m.get(_text_index(m))),
    ord("p"): lambda m: m._put(_text_index(m), m.stack[-1]),
}
