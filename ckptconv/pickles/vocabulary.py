"""What a pickle may say, for those who read one: names and what they mean as data, limits, and what can be wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import CorruptError
from ckptconv.pickles.nodes import Opaque

# Called with the arguments a pickle gives (all inert values, of any type and number, none to be trusted), returns the
# value, or NotImplemented if it has none for such arguments: the call is then kept as an `Opaque`. It may raise
# `MalformedError`. It can be called twice for the same part of a pickle.
Constructor: TypeAlias = Callable[[tuple[Any, ...]], Any]
# Called with an `Opaque` and the argument of a BUILD for it: returns the same `Opaque`, what it becomes, or
# NotImplemented.
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
    `builders`: what becomes of an `Opaque` of that class when it is given its state. It becomes a `NumpyArray` for all
    who refer to it already; another value takes its place on the stack, and in the memo if it was stored when it was
    made, as it is by all picklers.
    `persistent`: what a persistent id stands for.
    `phrases`: what makes the same as the others would for a phrase, at once; None where there is no such thing.
    """

    constructors: Mapping[tuple[str, str], Constructor] = field(default_factory=dict)
    constants: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    builders: Mapping[tuple[str, str], Builder] = field(default_factory=dict)
    persistent: Callable[[Any], Any] | None = None
    phrases: Callable[[Phrase], Maker | None] | None = None


# Python's own containers and numbers, and no more.
PLAIN = Vocabulary()


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


class TruncatedError(CorruptError):
    """The data ends before the pickle does."""


class MalformedError(Exception):
    """Raised inside the machine and by constructors: the reason only; the machine adds the file and the position."""


class OddError(MalformedError):
    """Arguments that a constructor is never given, and of which Python may make something. Of an `Opaque`, which is
    not known itself, an `Opaque` is made instead."""


class ExcessiveError(MalformedError):
    """More than `Limits` allow."""


class RefusedError(MalformedError):
    """Something valid that cannot be read."""
