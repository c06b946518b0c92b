"""The vocabulary of a pickle: names and their meaning as data, limits, and errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from ckptconv.pickles.nodes import Opaque

# Called with the arguments in the pickle: inert values of any type and number, none to be trusted. Returns the value,
# or NotImplemented if it has none for such arguments: the call is then kept as an `Opaque`. May raise `MalformedError`.
# May be called twice for the same part of a pickle.
Constructor: TypeAlias = Callable[[tuple[Any, ...]], Any]
# Called with an `Opaque` and the argument of a BUILD for it. Returns the same `Opaque`, the value that it becomes, or
# NotImplemented.
Builder: TypeAlias = Callable[[Opaque, Any], Any]


class Phrases(Protocol):
    """Reads sequences of opcodes of one pickle at once, with the same result as the machine.

    `opening`: the opcodes that they begin with. The first of these is MARK or EMPTY_TUPLE.
    """

    opening: bytes

    def read(self, data: bytes, pos: int, stack: list[Any], memo: list[Any]) -> tuple[int, int]:
        """Carry out the opcodes from `pos` on, with `stack` and `memo`. The memo may get HOLEs for values that are
        hardly ever referred to. Return the position after the opcodes, and the number of objects to charge; `pos` and 0
        if nothing was read."""

    def forget(self) -> None:
        """Clear the cache: a memo entry was replaced, so opcodes that fetch it may mean something else."""


class Vocabulary(NamedTuple):
    """The names that a pickle may use as data, beyond Python's own containers.

    `constructors`: by exact module and name of a class or function, the function that makes the value of a call.
    `constants`: the values of names by themselves.
    `classes`: names that stay names, of which persistent ids are made.
    `builders`: by class, the function that replaces an `Opaque` when BUILD gives it a state. A `NumpyArray` replaces it
    in place, for everything that refers to it. Any other value replaces it on the stack, and in the memo if it was
    stored when made, as by all picklers.
    `persistent`: returns the value of a persistent id.
    `enums`: the package, if any, of classes that are called with one value instead of a tuple of arguments, as
    TorchScript writes the members of its enumerations.
    `embedded`: called with an `Opaque` that got its state and the position after it, in bytes from the beginning of the
    pickle. If the object stands for bytes that follow in the file and are no part of the pickle, returns the position
    behind these bytes and the file's bytes from there on; else None.
    """

    constructors: Mapping[tuple[str, str], Constructor] = {}
    constants: Mapping[tuple[str, str], Any] = {}
    classes: Collection[tuple[str, str]] = frozenset()
    builders: Mapping[tuple[str, str], Builder] = {}
    persistent: Callable[[Any], Any] | None = None
    enums: str | None = None
    embedded: Callable[[Opaque, int], tuple[int, bytes] | None] | None = None


# Only Python's own containers and numbers.
PLAIN = Vocabulary()


class Limits(NamedTuple):
    """More than any honest pickle needs. The length of the pickle bounds everything else.

    `int_bytes`: bytes of an integer. Python itself does not print one of more than about 4,300 digits.
    `key_nodes`, `key_depth`: size of a dictionary key or set element, with shared parts counted at each occurrence.
    `same_hash`: keys of one container with the same hash. Strings and bytes, whose hashes are secret, do not count.
    `depth`: containers inside containers, because walks over the tree may recurse. Python's pickler gives up below
    1,000, unless its recursion limit is raised.
    `objects`: containers and objects that a pickle may make beyond those that its length accounts for.
    `cyclic`: whether lists, dictionaries and the like may contain themselves, as objects may.
    """

    depth: int = 256
    int_bytes: int = 1785
    key_nodes: int = 10_000
    key_depth: int = 100
    same_hash: int = 64
    objects: int = 1_000_000
    cyclic: bool = False


DEFAULT_LIMITS = Limits()
# For trees that are kept whole, by code that does not recurse.
WHOLE_TREES = Limits(depth=10_000, int_bytes=1 << 16, cyclic=True)


class MalformedError(Exception):
    """Raised inside the machine and by constructors, with the reason only. The machine adds file and position."""


class OddError(MalformedError):
    """A constructor got arguments that no pickler passes, but that Python may accept. If one of them is an `Opaque`,
    whose value is not known, the call is kept as an `Opaque` and is no error."""


class ExcessiveError(MalformedError):
    """The pickle exceeds `Limits`."""


class RefusedError(MalformedError):
    """The pickle is valid, but cannot be read here."""


def odd_call(name: str) -> OddError:
    return OddError(f"calls {name} with arguments that no pickler writes")
