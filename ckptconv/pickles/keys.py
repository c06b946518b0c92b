"""Keys of dictionaries and elements of sets that may take long to hash, or may be equal: few pickles have any."""

from __future__ import annotations

import contextlib
import decimal
import struct
import sys
from collections.abc import Hashable
from typing import Any, Literal

from ckptconv.pickles.nodes import PLAIN_KEYS, Global, NumpyScalar, Opaque, Size, TorchConstant, today
from ckptconv.pickles.vocabulary import ExcessiveError, Limits, MalformedError
from ckptconv.tensors.lazy import LazyTensor, Tagged
from ckptconv.text import brief

_TUPLES = frozenset((tuple, Size, Global, TorchConstant, NumpyScalar, frozenset))


class HashedKeys:
    """Admits keys that are neither texts nor small numbers, unless hashing or comparing them would take too long.

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

    def admit_other(self, container: Any, key: Any) -> Any:
        """Return `key`, or the `Opaque` that stands for it, as `Keys.admit` does."""
        if type(key) is Opaque:
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
        """Return whether `container` has `key` already."""
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
                raise ExcessiveError(f"has a key with more than {self.limits.key_nodes} parts")
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
                elif kind not in PLAIN_KEYS and kind is not float and kind is not complex:
                    raise MalformedError(f"uses a value of type {kind.__name__} as a key")
            if nodes + len(deeper) > self.limits.key_nodes:
                raise ExcessiveError(f"has a key with more than {self.limits.key_nodes} parts")
            if not deeper:
                break
            level = deeper
        else:
            raise ExcessiveError(f"has a key nested more than {self.limits.key_depth} levels deep")
        self.budget -= nodes
        if self.budget < 0:
            raise ExcessiveError("has keys that take too long to hash")
        return scalars

    def check(self) -> None:
        """Raise MalformedError for keys of one container that are, or may be, equal in Python and differ here."""
        for container in self._doubtful.values():
            made_of: list[Any] = []
            units: set[str] = set()
            forms = {_as_python(key, made_of, units) for key in container}
            if len(forms) < len(container) or len(units) > 1 or not forms.isdisjoint(made_of):
                raise MalformedError("has different keys that may be equal in Python")


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
    """Return the hashes of the numbers among an object's parts, by which its class may hash it.

    Numbers in texts have the hashes that Python gives a Decimal or a Fraction of them.
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
        return value_of(key)
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
    """Return whether an object is a call on plain values only, which tell it from other objects."""
    if key.call != "reduce" or type(key.cls) is not Global or len(key.args) > _MADE_OF:
        return False
    return all(type(part) in _VALUES for part in key.args)


_FLOATS = {2: "e", 4: "f", 8: "d"}


def value_of(scalar: NumpyScalar) -> Hashable:
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
    """Return whether a numpy scalar is a NaN or NaT, which equals no other, and maybe not itself."""
    if scalar.dtype[1] in "mM":
        return int.from_bytes(scalar.data, "big" if scalar.dtype[0] == ">" else "little", signed=True) == -1 << 63
    value = value_of(scalar)
    return value != value  # noqa: PLR0124
