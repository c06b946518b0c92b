"""Python's own containers and numbers, as a pickle makes them: none takes unreasonably long, or crashes Python."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from .tensors import LazyTensor
from .tree import Composite, Global, NumpyArray, NumpyScalar, Opaque, Size, TorchConstant
from .vocabulary import Constructor, ExcessiveError, Limits, MalformedError

_FREE = frozenset((str, bytes, bool, type(None), type(...), Opaque, Composite, NumpyArray))
_TUPLES = frozenset((tuple, Size, Global, TorchConstant, NumpyScalar, frozenset))
# Integers below this are their own hash.
_SMALL = 1 << 60
_DEQUES_DEEP = 100
# The memory of an empty one, in empty lists.
SET_COST, _DEQUE_COST = 3, 8


class Keys:
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


class Deques:
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
BUILTINS = ("builtins", "__builtin__")
_LATIN1 = frozenset(("latin1", "latin-1", "iso-8859-1", "iso8859-1"))
_FACTORIES: dict[tuple[str, str], Any] = {
    (module, made.__name__): made
    for module in BUILTINS
    for made in (list, dict, set, frozenset, tuple, int, float, bool, str, bytes, bytearray, complex)
} | {
    ("__builtin__", "long"): int,
    ("__builtin__", "unicode"): str,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
}
CONSTANTS: dict[tuple[str, str], Any] = {(module, "Ellipsis"): ... for module in BUILTINS}


def _pairs(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """What a dictionary can be made from: a dictionary, or a sequence of pairs."""
    if isinstance(value, dict):
        return value.items()
    if type(value) in (list, tuple) and all(type(pair) in (list, tuple) and len(pair) == 2 for pair in value):
        return value  # type: ignore[no-any-return]
    return None


def _mapping(made: Callable[[], dict[Any, Any]], keys: Keys) -> Constructor:
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


def _deque(args: tuple[Any, ...], deques: Deques) -> Any:
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


def _defaultdict(args: tuple[Any, ...], keys: Keys) -> Any:
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


def python(keys: Keys, deques: Deques) -> dict[tuple[str, str], Constructor]:
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
        (module, name): made for module in BUILTINS for name, made in builtins.items()
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
