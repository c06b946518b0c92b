"""The keys of containers, and the constructors of Python's own types: here those of dictionaries, which most pickles
call. None takes unreasonably long, or crashes Python."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ckptconv.pickles.nodes import PLAIN_KEYS
from ckptconv.pickles.vocabulary import Constructor, Limits, odd_call

if TYPE_CHECKING:
    from ckptconv.pickles.keys import HashedKeys
    from ckptconv.pickles.python_types import OtherTypes

# Integers of a smaller magnitude are their own hash.
_SMALL = 1 << 60
# The memory of an empty set, in empty lists.
SET_COST = 3


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


# ----------------------------------------------------------------------------------------- Python's own containers

# The module of the builtins in Python 3 and in Python 2. Protocols 0 to 2 use the Python 2 name.
BUILTINS = ("builtins", "__builtin__")
CONSTANTS: dict[tuple[str, str], Any] = {(module, "Ellipsis"): ... for module in BUILTINS}
# Classes whose `__new__` gives the same value for arguments as a call. Without arguments, that of all classes does.
TAKES_ARGUMENTS = frozenset(
    [("builtins", cls.__name__) for cls in (tuple, frozenset, bytes, str, bool, int, float, complex, range, slice)]
    + [("torch", "Size"), ("torch", "device"), ("numpy", "dtype")]
)


def _pairs(value: Any, name: str) -> Iterable[tuple[Any, Any]]:
    """Return the pairs of a dictionary, or of a sequence of pairs. Raises OddError for anything else."""
    if isinstance(value, dict):
        return value.items()
    if type(value) in (list, tuple) and all(type(pair) in (list, tuple) and len(pair) == 2 for pair in value):
        return value  # type: ignore[no-any-return]
    raise odd_call(name)


class Constructors:
    """The constructors of `PYTHON`. Many calls may share an argument, and each copies it, so every copy is charged."""

    def __init__(self, keys: Keys, charge: Callable[[int], None]) -> None:
        self.keys = keys
        self.charge = charge

    @functools.cached_property
    def others(self) -> OtherTypes:
        """The constructors of types other than dictionaries."""
        from ckptconv.pickles.python_types import OtherTypes

        return OtherTypes(self.keys.set_of, self._filled, self.charge)

    def mapping(self, cls: Callable[[], dict[Any, Any]]) -> Constructor:
        """OrderedDict(), OrderedDict(pairs), and the like. A Counter only of a dict: it would count anything else."""
        name = getattr(cls, "__name__", "dict")

        def construct(args: tuple[Any, ...]) -> Any:
            if not args:
                return cls()
            if len(args) > 1 or (cls is Counter and not isinstance(args[0], dict)):
                raise odd_call(name)
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


# The getter of each type's constructor, which few pickles ask for.
_BUILTINS: dict[str, Callable[[Constructors], Constructor]] = {
    "dict": lambda make: make.mapping(dict),
    "list": lambda make: make.others.sequence(list),
    "tuple": lambda make: make.others.sequence(tuple),
    "set": lambda make: make.others.set,
    "frozenset": lambda make: make.others.frozenset,
    "bytes": lambda make: make.others.bytes,
    "bytearray": lambda make: make.others.bytearray,
    "str": lambda make: make.others.str,
    "bool": lambda make: make.others.number(bool, 1, bool, int, float),
    "int": lambda make: make.others.number(int, 1, bool, int),
    "float": lambda make: make.others.number(float, 1, bool, float, int, str),
    "complex": lambda make: make.others.number(complex, 2, float, int, complex),
    "range": lambda make: make.others.number(range, 3, int),
    "slice": lambda make: make.others.slice,
}
# The constructors of Python's own types. All but that of defaultdict refuse arguments that they do not understand.
PYTHON: dict[tuple[str, str], Callable[[Constructors], Constructor]] = {
    **{(module, name): getter for module in BUILTINS for name, getter in _BUILTINS.items()},
    ("_codecs", "encode"): lambda make: make.others.encoded,
    ("collections", "OrderedDict"): lambda make: make.mapping(OrderedDict),
    ("collections", "Counter"): lambda make: make.mapping(Counter),
    ("collections", "deque"): lambda make: make.others.deque,
    ("collections", "defaultdict"): lambda make: make.others.defaultdict,
}
