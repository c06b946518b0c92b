"""Dataclasses and regular expressions whose code is made when it is first used: most of a program's are not in a run.

`dataclasses.dataclass` compiles up to six functions for a class, as it is defined, and `re.compile` its pattern. There
are some hundred of each, and they took a third of the time to start.
"""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass", "regex"]

if TYPE_CHECKING:
    from dataclasses import dataclass  # noqa: TID251
    from re import compile as regex
else:

    def dataclass(owner=None, /, **settings):
        """Make a dataclass, as `dataclasses.dataclass` with `frozen`, `slots`, `eq` and `init`."""
        return (lambda each: _made(each, **settings)) if owner is None else _made(owner)

    class regex:  # noqa: N801
        """A regular expression, compiled when it is first asked for anything."""

        def __init__(self, text, flags=0):
            self._given = text, flags

        def __reduce__(self):
            return regex, self._given

        def __getattr__(self, name):
            import re

            found = getattr(re.compile(*self._given), name)
            setattr(self, name, found)
            return found


def _made(owner: Any, *, frozen: bool = False, slots: bool = False, eq: bool = True, init: bool = True) -> Any:
    owner.__doc__ = owner.__doc__ or owner.__name__  # else dataclasses makes one, of the signature
    own = {name for name in vars(owner) if name != "__hash__" or vars(owner)[name] is not None}
    owner = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(owner)  # noqa: TID251
    methods: dict[str, Any] = {"__repr__": _repr}
    if init:
        methods["__init__"] = _init(owner, frozen=frozen, slots=slots)
    if eq:
        fields = dataclasses.fields(owner)
        methods["__eq__"] = _eq(_values([each.name for each in fields if each.compare]))
        hashed = [each.name for each in fields if (each.compare if each.hash is None else each.hash)]
        methods["__hash__"] = _hash(_values(hashed)) if frozen else None
    if frozen:
        methods |= _frozen(owner, {each.name for each in dataclasses.fields(owner)})
        if slots:
            methods |= {"__getstate__": _getstate, "__setstate__": _setstate}
    for name, method in methods.items():
        if name not in own:
            setattr(owner, name, method)
    return owner


def _init(owner: Any, **settings: Any) -> Callable[..., None]:
    """Return an `__init__` that puts the one which dataclasses would make in its own place."""

    def __init__(self: Any, *given: Any, **named: Any) -> None:  # noqa: N807
        fields = [(each.name, each.type, each) for each in dataclasses.fields(owner)]
        after = {"__post_init__": owner.__post_init__} if hasattr(owner, "__post_init__") else {}
        twin: Any = dataclasses.make_dataclass(
            owner.__name__, fields, namespace=after, repr=False, eq=False, **settings
        )
        made = vars(twin)["__init__"]
        made.__qualname__ = f"{owner.__qualname__}.__init__"
        if vars(owner).get("__init__") is __init__:
            owner.__init__ = made
        made(self, *given, **named)

    return __init__


def _values(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what gives the values of attributes as a tuple."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _eq(values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, Any], bool]:
    def __eq__(self: Any, other: Any) -> bool:  # noqa: N807
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:  # noqa: N807
        return hash(values(self))

    return __hash__


def _frozen(owner: Any, names: set[str]) -> dict[str, Callable[..., None]]:
    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        if type(self) is owner or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(owner, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:  # noqa: N807
        if type(self) is owner or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(owner, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in dataclasses.fields(self) if each.repr)
    return f"{type(self).__qualname__}({shown})"


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in dataclasses.fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for each, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)
