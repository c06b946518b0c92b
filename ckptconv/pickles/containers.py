"""Constructors of Python's own containers and numbers. None takes unreasonably long, or crashes Python."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ckptconv.pickles.nodes import PLAIN_KEYS, Global, Opaque, Size, today
from ckptconv.pickles.vocabulary import Constructor, ExcessiveError, Limits, MalformedError, OddError
from ckptconv.text import brief

if TYPE_CHECKING:
    from ckptconv.pickles.keys import HashedKeys

# Integers of a smaller magnitude are their own hash.
_SMALL = 1 << 60
_DEQUES_DEEP = 100
# The memory of an empty set and of an empty deque, in empty lists.
SET_COST, _DEQUE_COST = 3, 8
# Copied bytes that are charged as one object.
_BYTES_EACH = 64


# ------------------------------------------------------------------------------------------------------------- keys


class Keys:
    """Admits keys to dictionaries and elements to sets. Most pickles have none but texts and small numbers; others,
    which may take long to hash, or may be equal, are left to `HashedKeys`."""

    def __init__(self, limits: Limits, size: int) -> None:
        self.limits, self._size = limits, size
        self._others: HashedKeys | None = None

    def admit(self, container: Any, key: Any) -> Any:
        """Return `key`, or the `Opaque` that stands for a tensor, if it may become a key or element of `container`.

        Raises MalformedError if it may not.
        """
        kind = type(key)
        if kind in PLAIN_KEYS or (kind is int and -_SMALL < key < _SMALL):
            return key
        return self.admit_other(container, key)

    def admit_other(self, container: Any, key: Any) -> Any:
        """Admit a key that may take long to hash, or may be equal to another one."""
        if self._others is None:
            from ckptconv.pickles.keys import HashedKeys

            self._others = HashedKeys(self.limits, self._size)
        return self._others.admit_other(container, key)

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

    def check(self) -> None:
        """Raise MalformedError for keys of one container that are, or may be, equal in Python and differ here.

        Call this after the whole pickle was read: no key is ever removed from a container.
        """
        if self._others is not None:
            self._others.check()


# ----------------------------------------------------------------------------------------------------------- deques


class Deques:
    """Extends deques. Python frees nested deques by recursion in C, and crashes if they are nested too deep."""

    def __init__(self, charge: Callable[[int], None]) -> None:
        self.charge = charge
        # By identity: how many levels of deques each has, and the deques that are inside another.
        self._levels: dict[int, int] = {}
        self._inner: set[int] = set()

    def extend(self, target: deque[Any], items: Iterable[Any]) -> None:
        for item in items:
            if type(item) is deque:
                levels = 1 + self._levels.get(id(item), 1)
                if levels > _DEQUES_DEEP:
                    raise ExcessiveError(f"has more than {_DEQUES_DEEP} deques inside one another")
                if id(target) in self._inner:
                    # No pickler does this. The levels of the outer deque would have to be counted again.
                    raise MalformedError("adds a deque to a deque that is inside another already")
                self._levels[id(target)] = max(levels, self._levels.get(id(target), 1))
                self._inner.add(id(item))
        target.extend(items)


# ----------------------------------------------------------------------------------------- Python's own containers

# Containers with an order of their own, and containers without.
_SEQUENCES = frozenset((list, tuple, deque, Size))
_SETS = frozenset((set, frozenset))
# The module of the builtins in Python 3 and in Python 2. Protocols 0 to 2 use the Python 2 name.
BUILTINS = ("builtins", "__builtin__")
_LATIN1 = frozenset(("latin1", "latin-1", "iso-8859-1", "iso8859-1"))
_FACTORIES: dict[tuple[str, str], Any] = {
    ("builtins", cls.__name__): cls
    for cls in (list, dict, set, frozenset, tuple, int, float, bool, str, bytes, bytearray, complex)
} | {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
}
CONSTANTS: dict[tuple[str, str], Any] = {(module, "Ellipsis"): ... for module in BUILTINS}
# Classes whose `__new__` alone makes the same of arguments as a call does. Without arguments, that of all classes does.
TAKES_ARGUMENTS = frozenset(
    [("builtins", cls.__name__) for cls in (tuple, frozenset, bytes, str, bool, int, float, complex, range, slice)]
    + [("torch", "Size"), ("torch", "device"), ("numpy", "dtype")]
)


def _odd(name: str) -> OddError:
    return OddError(f"calls {name} with arguments that no pickler writes")


def _pairs(value: Any, name: str) -> Iterable[tuple[Any, Any]]:
    """Return the pairs of a dictionary, or of a sequence of pairs. Raises OddError for anything else."""
    if isinstance(value, dict):
        return value.items()
    if type(value) in (list, tuple) and all(type(pair) in (list, tuple) and len(pair) == 2 for pair in value):
        return value  # type: ignore[no-any-return]
    raise _odd(name)


class Constructors:
    """The constructors of `PYTHON`. Many calls may share an argument, and each copies it, so every copy is charged."""

    def __init__(self, keys: Keys, deques: Deques, charge: Callable[[int], None]) -> None:
        self.keys = keys
        self.deques = deques
        self.charge = charge

    def mapping(self, cls: Callable[[], dict[Any, Any]]) -> Constructor:
        """OrderedDict(), OrderedDict(pairs), and the like. A Counter only of a dict: it would count anything else."""
        name = getattr(cls, "__name__", "dict")

        def construct(args: tuple[Any, ...]) -> Any:
            if not args:
                return cls()
            if len(args) > 1 or (cls is Counter and not isinstance(args[0], dict)):
                raise _odd(name)
            return self._filled(cls(), args[0], name)

        return construct

    def _filled(self, target: dict[Any, Any], value: Any, name: str) -> dict[Any, Any]:
        if type(value) in (list, tuple):
            self.charge(len(value))
        pairs = _pairs(value, name)
        if isinstance(value, dict):
            self.charge(len(value))
        self.keys.fill(target, pairs)
        return target

    def sequence(self, cls: Callable[[Any], Any]) -> Constructor:
        """list(), list(items), and the like, where `items` is a container with an order."""
        name = getattr(cls, "__name__", "list")

        def construct(args: tuple[Any, ...]) -> Any:
            return cls(self._items(args, _SEQUENCES, name))

        return construct

    def _items(self, args: tuple[Any, ...], kinds: frozenset[type], name: str) -> Any:
        if not args:
            return ()
        if len(args) > 1 or type(args[0]) not in kinds:
            raise _odd(name)
        self.charge(len(args[0]))
        return args[0]

    def set(self, args: tuple[Any, ...]) -> Any:
        return self.keys.set_of(self._items(args, _SEQUENCES | _SETS, "set"))

    def frozenset(self, args: tuple[Any, ...]) -> Any:
        return frozenset(self.keys.set_of(self._items(args, _SEQUENCES | _SETS, "frozenset")))

    def bytes(self, args: tuple[Any, ...]) -> Any:
        """bytes(), bytes(b"…") or bytes(text, "latin1"); never bytes(n), which would allocate as much as n says."""
        if not args:
            return b""
        if len(args) == 1 and type(args[0]) in (bytes, bytearray):
            self.charge(len(args[0]) // _BYTES_EACH)
            return bytes(args[0])
        return self.encoded(args)

    def encoded(self, args: tuple[Any, ...]) -> Any:
        """Encode text as Latin-1: protocols that have no bytes carry them as text."""
        if len(args) != 2 or type(args[0]) is not str or type(args[1]) is not str:
            raise _odd("bytes")
        self.charge(len(args[0]) // _BYTES_EACH)
        if len(args[1]) > 20 or args[1].lower() not in _LATIN1:
            raise MalformedError(f"encodes text as bytes in {brief(args[1])}, unlike any pickler")
        try:
            return args[0].encode("latin-1")
        except UnicodeEncodeError:
            raise MalformedError("encodes text as bytes that has characters above U+00FF") from None

    def bytearray(self, args: tuple[Any, ...]) -> Any:
        data = self.bytes(args)
        self.charge(len(data) // _BYTES_EACH)
        return bytearray(data)

    def str(self, args: tuple[Any, ...]) -> Any:
        if not args or (len(args) == 1 and type(args[0]) is str):
            return args[0] if args else ""
        raise _odd("str")

    def number(self, cls: Callable[..., Any], most: int, *kinds: type) -> Constructor:
        """Return a constructor of numbers from up to `most` arguments, each of exactly one of the types `kinds`."""
        name = getattr(cls, "__name__", "number")

        def construct(args: tuple[Any, ...]) -> Any:
            if len(args) > most or any(type(arg) not in kinds for arg in args):
                raise _odd(name)
            if str in kinds and args and type(args[0]) is str:
                self.charge(len(args[0]) // _BYTES_EACH)
            try:
                return cls(*args)
            except (TypeError, ValueError, OverflowError):
                raise _odd(name) from None

        return construct

    def slice(self, args: tuple[Any, ...]) -> Any:
        """slice(stop), slice(start, stop), slice(start, stop, step)."""
        if not 1 <= len(args) <= 3 or not all(map(_can_be_sliced, args)):
            raise _odd("slice")
        return slice(*args)

    def deque(self, args: tuple[Any, ...]) -> Any:
        """deque(), deque(items), deque(items, maxlen)."""
        maxlen = args[1] if len(args) == 2 else None
        if maxlen is not None and (type(maxlen) is not int or not 0 <= maxlen < 1 << 62):
            raise _odd("deque")
        items = self._items(args[:1] if len(args) == 2 else args, _SEQUENCES, "deque")
        self.charge(_DEQUE_COST)
        result: deque[Any] = deque(maxlen=maxlen)
        self.deques.extend(result, items)
        return result

    def defaultdict(self, args: tuple[Any, ...]) -> Any:
        """defaultdict(), defaultdict(factory), defaultdict(factory, pairs); the factory is in `_FACTORIES` or None.

        Returns NotImplemented for any other class or function as the factory.
        """
        factory = args[0] if args else None
        if len(args) > 2 or (factory is not None and type(factory) not in (Global, Opaque)):
            raise _odd("defaultdict")
        if factory is not None:
            factory = _FACTORIES.get(today((factory.module, factory.name))) if type(factory) is Global else None
            if factory is None:
                return NotImplemented
        target: defaultdict[Any, Any] = defaultdict(factory)
        return self._filled(target, args[1], "defaultdict") if len(args) == 2 else target


def _can_be_sliced(value: Any, levels: int = 4) -> bool:
    """Whether a slice of `value` is harmless: Python frees slices, like deques, by recursion in C."""
    if type(value) is slice:
        return levels > 0 and all(_can_be_sliced(part, levels - 1) for part in (value.start, value.stop, value.step))
    return type(value) is not deque


# The getter of each type's constructor, which few pickles ask for.
_BUILTINS: dict[str, Callable[[Constructors], Constructor]] = {
    "dict": lambda make: make.mapping(dict),
    "list": lambda make: make.sequence(list),
    "tuple": lambda make: make.sequence(tuple),
    "set": lambda make: make.set,
    "frozenset": lambda make: make.frozenset,
    "bytes": lambda make: make.bytes,
    "bytearray": lambda make: make.bytearray,
    "str": lambda make: make.str,
    "bool": lambda make: make.number(bool, 1, bool, int, float),
    "int": lambda make: make.number(int, 1, bool, int),
    "float": lambda make: make.number(float, 1, bool, float, int, str),
    "complex": lambda make: make.number(complex, 2, float, int, complex),
    "range": lambda make: make.number(range, 3, int),
    "slice": lambda make: make.slice,
}
# The constructors of Python's own types. All but that of defaultdict refuse arguments that they do not understand.
PYTHON: dict[tuple[str, str], Callable[[Constructors], Constructor]] = {
    **{(module, name): getter for module in BUILTINS for name, getter in _BUILTINS.items()},
    ("_codecs", "encode"): lambda make: make.encoded,
    ("collections", "OrderedDict"): lambda make: make.mapping(OrderedDict),
    ("collections", "Counter"): lambda make: make.mapping(Counter),
    ("collections", "deque"): lambda make: make.deque,
    ("collections", "defaultdict"): lambda make: make.defaultdict,
}
