"""Constructors of Python's own containers and numbers. None takes unreasonably long, or crashes Python."""

from __future__ import annotations

import contextlib
import decimal
import struct
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal

from ckptconv.pickles.nodes import Composite, Global, NumpyScalar, Opaque, Size, TorchConstant
from ckptconv.pickles.vocabulary import Constructor, ExcessiveError, Limits, MalformedError, OddError
from ckptconv.tensors.lazy import LazyTensor, Tagged
from ckptconv.text import brief

_FREE = frozenset((str, bytes, bool, type(None), type(...), Composite))
_TUPLES = frozenset((tuple, Size, Global, TorchConstant, NumpyScalar, frozenset))
# Integers of a smaller magnitude are their own hash.
_SMALL = 1 << 60
_DEQUES_DEEP = 100
# The memory of an empty set and of an empty deque, in empty lists.
SET_COST, _DEQUE_COST = 3, 8
# Copied bytes that are charged as one object.
_BYTES_EACH = 64


def today(name: tuple[str, str]) -> tuple[str, str]:
    """Return the Python 3 (module, name) of the Python 2 `name`, which is (module, name) too."""
    module, attribute = NAME_MAPPING.get(name, name)
    return IMPORT_MAPPING.get(module, module), attribute


# ------------------------------------------------------------------------------------------------------------- keys


class Keys:
    """Admits keys to dictionaries and elements to sets, unless hashing or comparing them would take unreasonably long.

    A tuple of two references to a tuple of two references to … takes a few bytes in a pickle and forever to hash. Keys
    with equal hashes turn every insertion into a search.

    Keys that are equal are one key. `check` refuses keys that Python takes for equal and that differ here: a numpy
    scalar equals the number of its value, and a class equals itself under its Python 2 name. Only its class knows what
    an object equals. Two objects made by the same call are refused, because members of enums would be one key. An
    object made by a call of another key alone is refused, because a member of an IntEnum would equal that key. All
    other objects count as different.
    """

    def __init__(self, limits: Limits, size: int) -> None:
        self.limits = limits
        # Python does not cache hashes of tuples, and a reference to a tuple costs two bytes: their sum is limited too.
        self.budget = 1_000_000 + 2 * size
        # By identity of a container: the container (which keeps the identity in use), and how often each hash occurred.
        self.seen: dict[int, tuple[Any, dict[int, int]]] = {}
        # By identity, containers with keys that Python may take for equal though they differ here.
        self._doubtful: dict[int, Any] = {}
        # By identity of tuples and objects in keys: these, how many states they have got, their parts and levels.
        self.weights: dict[int, tuple[Any, int, int, int]] = {}
        # By identity, tensors that are keys, and the `Opaque` that stands for each.
        self._tensors: dict[int, tuple[LazyTensor, Opaque]] = {}

    def admit(self, container: Any, key: Any) -> Any:
        """Return `key`, or the `Opaque` that stands for a tensor, if it may become a key or element of `container`.

        Raises MalformedError if it may not.
        """
        kind = type(key)
        if kind in _FREE or (kind is int and -_SMALL < key < _SMALL):
            return key
        if kind is Opaque:
            if key.call == "reduce":
                self._doubtful[id(container)] = container
            self.weigh(key)
            self._count(container, hash(_numbers_in(key)))
            return key
        if isinstance(key, LazyTensor):
            return self._tensor(key)
        scalars = self._spend(container, key)
        if not self._holds(container, key):
            self._count(container, hash(_as_python(key)) if scalars else hash(key))
        elif any(map(_is_nan, scalars)):
            raise MalformedError("has a numpy NaN as a key twice, which may be two keys or one")
        return key

    def _holds(self, container: Any, key: Any) -> bool:
        """Whether `container` has `key` already."""
        return key in container

    def _count(self, container: Any, code: int) -> None:
        hashes = self.seen.setdefault(id(container), (container, {}))[1]
        hashes[code] = count = hashes.get(code, 0) + 1
        # Objects without numbers are distinguished by their other parts.
        if count > self.limits.same_hash and code != _NO_NUMBERS:
            raise ExcessiveError(f"has more than {self.limits.same_hash} keys with the same hash in one container")

    def weigh(self, key: Any) -> None:
        """Check that an object, or a tuple, is hashed soon: a class may hash the parts of its objects, and each part as
        often as it occurs.
        """
        # Tuples and objects being walked: the parts that are left, the number of parts, and their levels.
        path: list[list[Any]] = [[key, _hashed(key), 1, 1]]
        while path:
            node, parts, weight, levels = path[-1]
            if max(len(path), levels) > self.limits.key_depth:
                raise ExcessiveError(f"has a key nested more than {self.limits.key_depth} levels deep")
            if weight > self.limits.key_nodes:
                raise ExcessiveError(f"has a key made of more than {self.limits.key_nodes} parts")
            if parts:
                part = parts.pop()
                known = self.weights.get(id(part))
                if known and known[1] == (len(part.state) if type(part) is Opaque else 0):
                    path[-1][2:] = weight + known[2], max(levels, known[3] + 1)
                elif not any(part is ancestor for ancestor, *_ in path):
                    path.append([part, _hashed(part), 1, 1])
                continue
            path.pop()
            self.weights[id(node)] = node, len(node.state) if type(node) is Opaque else 0, weight, levels
            if path:
                path[-1][2:] = path[-1][2] + weight, max(path[-1][3], levels + 1)

    def _tensor(self, tensor: LazyTensor) -> Opaque:
        """Return the `Opaque` that stands for a tensor as a key. Each has its own: torch compares them by identity."""
        if isinstance(tensor, Tagged) and tensor.facts.kind == "storage":
            raise MalformedError("uses a storage as a key")
        return self._tensors.setdefault(id(tensor), (tensor, Opaque(Global("torch", "Tensor"), (tensor,))))[1]

    def _spend(self, container: Any, key: Any) -> list[NumpyScalar]:
        """Count the parts of `key` and check each. Return the numpy scalars among them."""
        nodes = 0
        level = [key]
        scalars: list[NumpyScalar] = []
        for _ in range(self.limits.key_depth):
            deeper: list[Any] = []
            nodes += len(level)
            for item in level:
                kind = type(item)
                if kind in _TUPLES:
                    deeper += item
                    if kind is NumpyScalar:
                        scalars.append(item)
                    if kind is NumpyScalar or kind is Global:
                        self._doubtful[id(container)] = container
                    if nodes + len(deeper) > self.limits.key_nodes:
                        break
                elif kind is int:
                    nodes += item.bit_length() >> 7
                elif kind is range:
                    deeper += (item.start, item.stop, item.step)
                elif kind is Opaque:
                    self._doubtful[id(container)] = container
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
        return scalars

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
        for container in self._doubtful.values():
            made_of: list[Any] = []
            units: set[str] = set()
            forms = {_as_python(key, made_of, units) for key in container}
            if len(forms) < len(container) or len(units) > 1 or not forms.isdisjoint(made_of):
                raise MalformedError("has keys that differ, but may be equal in Python")


# The hash of an object without numbers.
_NO_NUMBERS = hash(())
# Longer texts are no numbers.
_DIGITS = 5_000


def _hashed(part: Any) -> list[Any]:
    """Return the tuples and objects by which a tuple or an object may be hashed."""
    if type(part) is not Opaque:
        parts = list(part)
    else:
        parts = [*part.args] if isinstance(part.args, tuple) else []
        for state in part.state:
            parts += state.values() if type(state) is dict else [state]
    return [part_of for part_of in parts if type(part_of) in (tuple, frozenset, Opaque)]


def _numbers_in(key: Opaque) -> tuple[int, ...]:
    """Return the hashes of the numbers that an object is made of, by which its class may hash it.

    Those of numbers in texts are Python's for a Decimal or a Fraction of them.
    """
    parts = [*key.args] if isinstance(key.args, tuple) else []
    for state in key.state:
        parts += state.values() if type(state) is dict else state if type(state) is tuple else ()
    if [type(part) for part in parts] == [int, int] and parts[1] % sys.hash_info.modulus:
        return (parts[0] * pow(parts[1], -1, sys.hash_info.modulus) % sys.hash_info.modulus,)
    hashes = [hash(part) for part in parts if type(part) in (int, float)]
    for part in parts:
        if type(part) is str and len(part) < _DIGITS:
            with contextlib.suppress(ArithmeticError, ValueError):
                hashes.append(hash(decimal.Decimal(part)))
    return tuple(hashes)


# An object is compared with others if its call has at most `_MADE_OF` arguments, all of these types.
_VALUES = frozenset((str, bytes, bool, int, float, type(None), Global, TorchConstant))
_MADE_OF = 16
_CALL = object()


def _as_python(key: Any, made_of: list[Any] | None = None, units: set[str] | None = None) -> Hashable:
    """Return a form of `key` that equals the form of another key if Python takes the two keys for equal.

    Appends to `made_of` the argument of an object that is made from one alone. Adds to `units` the dtypes, which
    include the unit, of dates and times.
    """
    kind = type(key)
    if kind is NumpyScalar:
        if units is not None and key.dtype[1] in "mM":
            units.add(key.dtype)
        return _scalar(key)
    if kind is Global:
        return Global(*today((key.module, key.name)))
    if kind is tuple or kind is Size:
        return tuple([_as_python(part, made_of, units) for part in key])
    if kind is frozenset:
        return frozenset([_as_python(part, made_of, units) for part in key])
    if kind is Opaque and _is_made_of_values(key):
        if len(key.args) == 1 and made_of is not None:
            made_of.append(key.args[0])
        return (_CALL, _as_python(key.cls), key.args)
    return key  # type: ignore[no-any-return]


def _is_made_of_values(key: Opaque) -> bool:
    """Whether an object is made by a call with plain values only, which tell it from others."""
    if key.call != "reduce" or type(key.cls) is not Global or len(key.args) > _MADE_OF:
        return False
    return all(type(part) in _VALUES for part in key.args)


_FLOATS = {2: "e", 4: "f", 8: "d"}


def _scalar(scalar: NumpyScalar) -> Hashable:
    """Return the number, text or bytes that a numpy scalar equals and hashes like; a date or time as it is. Raises
    MalformedError for other dtypes."""
    order, kind, data = scalar.dtype[0], scalar.dtype[1], scalar.data
    byteorder: Literal["big", "little"] = "big" if order == ">" else "little"
    if kind in "iub":
        number = int.from_bytes(data, byteorder, signed=kind == "i")
        return bool(number) if kind == "b" else number
    if kind in "fc":
        count = 2 if kind == "c" else 1
        code = _FLOATS.get(len(data) // count)
        if code is not None:
            parts = struct.unpack(f"{'>' if order == '>' else '<'}{count}{code}", data)
            return complex(*parts) if kind == "c" else parts[0]
    if kind == "S":
        return data.rstrip(b"\0")
    if kind == "U":
        try:
            return str(data, f"utf-32-{byteorder[0]}e", "surrogatepass").rstrip("\0")
        except UnicodeDecodeError:
            pass
    if kind in "mM":
        return scalar
    raise MalformedError(f"uses a numpy scalar of {brief(scalar.dtype)} as a key")


def _is_nan(scalar: NumpyScalar) -> bool:
    """Whether a numpy scalar is a NaN or NaT, which equals no other, and maybe not itself."""
    if scalar.dtype[1] in "mM":
        return int.from_bytes(scalar.data, "big" if scalar.dtype[0] == ">" else "little", signed=True) == -1 << 63
    value = _scalar(scalar)
    return value != value  # noqa: PLR0124


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
