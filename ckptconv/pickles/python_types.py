"""Constructors of Python's own types other than dictionaries, of which few pickles have any: sequences, sets, deques,
numbers, texts and bytes. None takes unreasonably long, or crashes Python."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from ckptconv.pickles.nodes import Global, Opaque, Size, today
from ckptconv.pickles.vocabulary import Constructor, ExcessiveError, MalformedError, odd_call
from ckptconv.text import brief

_DEQUES_DEEP = 100
# The memory of an empty deque, in empty lists.
_DEQUE_COST = 8
# Copied bytes that are charged as one object.
_BYTES_EACH = 64
# Containers with an order of their own, and containers without.
_SEQUENCES = frozenset((list, tuple, deque, Size))
_SETS = frozenset((set, frozenset))
_LATIN1 = frozenset(("latin1", "latin-1", "iso-8859-1", "iso8859-1"))
_FACTORIES: dict[tuple[str, str], Any] = {
    ("builtins", cls.__name__): cls
    for cls in (list, dict, set, frozenset, tuple, int, float, bool, str, bytes, bytearray, complex)
} | {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
}


class Deques:
    """Extends deques. Python frees nested deques by recursion in C, and crashes if they are nested too deep."""

    def __init__(self) -> None:
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
                    raise MalformedError("adds a deque to a deque that is already inside another deque")
                self._levels[id(target)] = max(levels, self._levels.get(id(target), 1))
                self._inner.add(id(item))
        target.extend(items)


class OtherTypes:
    """The constructors of types other than dictionaries. `set_of` makes a set, `filled` fills a dictionary, and every
    copy is charged."""

    def __init__(
        self,
        set_of: Callable[[Iterable[Any]], set[Any]],
        filled: Callable[[dict[Any, Any], Any, str], dict[Any, Any]],
        charge: Callable[[int], None],
    ) -> None:
        self._set_of, self._filled, self._charge = set_of, filled, charge
        self.deques = Deques()

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
            raise odd_call(name)
        self._charge(len(args[0]))
        return args[0]

    def set(self, args: tuple[Any, ...]) -> Any:
        return self._set_of(self._items(args, _SEQUENCES | _SETS, "set"))

    def frozenset(self, args: tuple[Any, ...]) -> Any:
        return frozenset(self._set_of(self._items(args, _SEQUENCES | _SETS, "frozenset")))

    def bytes(self, args: tuple[Any, ...]) -> Any:
        """bytes(), bytes(b"…") or bytes(text, "latin1"); never bytes(n), which would allocate as much as n says."""
        if not args:
            return b""
        if len(args) == 1 and type(args[0]) in (bytes, bytearray):
            self._charge(len(args[0]) // _BYTES_EACH)
            return bytes(args[0])
        return self.encoded(args)

    def encoded(self, args: tuple[Any, ...]) -> Any:
        """Encode text as Latin-1: protocols that have no bytes carry them as text."""
        if len(args) != 2 or type(args[0]) is not str or type(args[1]) is not str:
            raise odd_call("bytes")
        self._charge(len(args[0]) // _BYTES_EACH)
        if len(args[1]) > 20 or args[1].lower() not in _LATIN1:
            raise MalformedError(f"encodes text as bytes in {brief(args[1])}, unlike any pickler")
        try:
            return args[0].encode("latin-1")
        except UnicodeEncodeError:
            raise MalformedError("encodes text with characters above U+00FF as bytes") from None

    def bytearray(self, args: tuple[Any, ...]) -> Any:
        data = self.bytes(args)
        self._charge(len(data) // _BYTES_EACH)
        return bytearray(data)

    def str(self, args: tuple[Any, ...]) -> Any:
        if not args or (len(args) == 1 and type(args[0]) is str):
            return args[0] if args else ""
        raise odd_call("str")

    def number(self, cls: Callable[..., Any], most: int, *kinds: type) -> Constructor:
        """Return a constructor of numbers from up to `most` arguments, each of exactly one of the types `kinds`."""
        name = getattr(cls, "__name__", "number")

        def construct(args: tuple[Any, ...]) -> Any:
            if len(args) > most or any(type(arg) not in kinds for arg in args):
                raise odd_call(name)
            if str in kinds and args and type(args[0]) is str:
                self._charge(len(args[0]) // _BYTES_EACH)
            try:
                return cls(*args)
            except (TypeError, ValueError, OverflowError):
                raise odd_call(name) from None

        return construct

    def slice(self, args: tuple[Any, ...]) -> Any:
        """slice(stop), slice(start, stop), slice(start, stop, step)."""
        if not 1 <= len(args) <= 3 or not all(map(_can_be_sliced, args)):
            raise odd_call("slice")
        return slice(*args)

    def deque(self, args: tuple[Any, ...]) -> Any:
        """deque(), deque(items), deque(items, maxlen)."""
        maxlen = args[1] if len(args) == 2 else None
        if maxlen is not None and (type(maxlen) is not int or not 0 <= maxlen < 1 << 62):
            raise odd_call("deque")
        items = self._items(args[:1] if len(args) == 2 else args, _SEQUENCES, "deque")
        self._charge(_DEQUE_COST)
        result: deque[Any] = deque(maxlen=maxlen)
        self.deques.extend(result, items)
        return result

    def defaultdict(self, args: tuple[Any, ...]) -> Any:
        """defaultdict(), defaultdict(factory), defaultdict(factory, pairs); the factory is in `_FACTORIES` or None.

        Returns NotImplemented for any other class or function as the factory.
        """
        factory = args[0] if args else None
        if len(args) > 2 or (factory is not None and type(factory) not in (Global, Opaque)):
            raise odd_call("defaultdict")
        if factory is not None:
            factory = _FACTORIES.get(today((factory.module, factory.name))) if type(factory) is Global else None
            if factory is None:
                return NotImplemented
        target: defaultdict[Any, Any] = defaultdict(factory)
        return self._filled(target, args[1], "defaultdict") if len(args) == 2 else target


def _can_be_sliced(value: Any, levels: int = 4) -> bool:
    """Return whether a slice of `value` is harmless: Python frees slices, like deques, by recursion in C."""
    if type(value) is slice:
        return levels > 0 and all(_can_be_sliced(part, levels - 1) for part in (value.start, value.stop, value.step))
    return type(value) is not deque
