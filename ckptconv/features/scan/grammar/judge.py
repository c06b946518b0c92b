"""Judges, instruction by instruction, the objects that a pickle makes: a production of the grammar allows one, or it is
unknown.

A name alone does not count: a class or function is known with the arguments, the state and the items that its own
pickling writes. Every step is judged at the moment at which Python would take it, with the values of that moment.
Values that counted for a verdict may not change afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckptconv.features.scan.grammar.patterns import (
    _KINDS,
    GETATTR,
    UNKNOWN_VALUE,
    Pattern,
    current,
    is_class,
    is_name,
    resolved,
)
from ckptconv.features.scan.grammar.table import Entry, Production, grammar
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.text import brief

# The most parts of values that are judged in a pickle, besides as many as it has bytes; and the most containers that
# may count.
_STEPS, _COUNTING = 2_000_000, 50_000
# The bytes that a call may copy for each part of a value that is judged.
_BYTES_A_STEP = 8
# Calls that make a function from their arguments, and do not call it.
_INERT = frozenset(
    Global(module, name)
    for module, names in (
        ("builtins", "getattr iter type"),
        ("functools", "partial"),
        ("_operator", "getitem"),
        ("operator", "getitem"),
    )
    for name in names.split()
)
_INERT_NAMES = frozenset(each.name for each in _INERT)
# Packages with classes that evaluate the text from which they are made.
_EVALUATING = frozenset({"asteval", "jinja2", "mako", "numexpr", "simpleeval", "sympy", "typing", "typing_extensions"})
# Names of attributes whose text is evaluated when an object gets its state.
_EVALUATED = frozenset({"_parse_arg_template", "restore_design_info", "restore_model_spec"})
# Attributes that unpicklers look up in an object, and call with arguments from the pickle.
CALLED_BY_NAME = frozenset({"__setstate__", "__class__", "__reduce_ex__", "__getinitargs__", "add", "append", "extend"})
_held, _any, _data = _KINDS["held"], _KINDS["any"], _KINDS["data"]


def is_reviewed(name: Global) -> bool:
    """Return whether the grammar has a production for a name."""
    return grammar().entry(name) is not None


class Judge:
    """The unreviewed parts of one pickle: `unknown` names, and `unknown_calls`, in words."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        # The entry of each name in the pickle. A pickle has one `Global` for all mentions of a name.
        self._known: dict[Global, Entry | None] = {}
        self.unknown: dict[Global, None] = {}
        self.unknown_calls: dict[str, None] = {}
        # Allowed arguments of functions that are bytes: some functions load them.
        self.bytes_given: list[tuple[Global, bytes | bytearray]] = []
        self._steps = _STEPS + size
        # By identity: containers that counted for a verdict.
        self._entered: dict[int, Any] = {}

    # ---- questions of patterns

    def enter(self, container: Any) -> bool:
        self._steps -= 1 + len(container)
        if type(container) is not tuple:
            self._entered[id(container)] = container
        return self._steps > 0 and len(self._entered) < _COUNTING

    def copy(self, nbytes: int) -> bool:
        self._steps -= nbytes // _BYTES_A_STEP
        return self._steps > 0

    def is_value(self, name: Global) -> bool:
        entry = self._entry(name)
        return entry is not None and entry.is_value

    def is_held(self, name: Global) -> bool:
        entry = self._entry(name)
        return entry is not None and (entry.is_value or entry.is_held)

    def is_data(self, built: Opaque) -> bool:
        entry = self._entry(built.cls)
        return entry is not None and entry.is_data

    def is_function(self, built: Opaque) -> bool:
        name = resolved(built.cls)
        if name is not None and name.name not in _INERT_NAMES:
            return False
        if name is None or current(name) == GETATTR:
            attribute = resolved(built)
            return attribute is None or not (self.is_held(attribute) or self._is_member(built))
        return current(name) in _INERT

    def _is_member(self, built: Opaque) -> bool:
        """Return whether `getattr` fetches a member of an enumeration."""
        entry = self._entry(built.args[0]) if type(built.args[0]) is Global else None
        return entry is not None and entry.is_value and entry.is_data and built.args[1].isupper()

    def _entry(self, function: Any) -> Entry | None:
        """Return the entry of a called function; None if there is none."""
        name = function if type(function) is Global else resolved(function)
        if name is None:
            return None
        try:
            return self._known[name]
        except KeyError:
            self._known[name] = entry = grammar().entry(name)
            return entry

    # ---- actions of the machine

    def mention(self, name: Global) -> None:
        """Judge a class or function that is named, which imports its module."""
        if self._entry(name) is None and current(name) not in _INERT:
            self.unknown[name] = None

    def put(self, values: Iterable[Any]) -> None:
        """Judge values that are put into a list, a set or a dict, or that are the pickle's result."""
        for value in values:
            kind = type(value)
            if (kind is tuple or kind is Global or kind is Opaque) and not _held(self, value):
                self._functions_in(value)

    def call(self, function: Any, args: tuple[Any, ...], how: str, kwargs: dict[str, Any] | None) -> None:
        """Judge a call, or an object that is made without arguments."""
        name = function if type(function) is Global else resolved(function)
        if name is None:
            root = function
            while type(root) is Opaque:
                root = root.cls
            self.unknown_calls[f"the result of {brief(root, 200)}"] = None
            return
        entry = self._entry(name)
        if entry is not None and self._allowed(entry, args, how, kwargs):
            for arg in args:
                if type(arg) is bytes or type(arg) is bytearray:
                    self.bytes_given.append((name, arg))
            return
        if self._is_grave(name, args if not kwargs else (*args, *kwargs.values()), how):
            self.unknown_calls[brief(name, 200)] = None
        else:
            self.unknown[name] = None
            self.put(args)

    def _allowed(self, entry: Entry, args: tuple[Any, ...], how: str, kwargs: dict[str, Any] | None) -> bool:
        if kwargs:
            # Keyword arguments may be what any number of further arguments may be.
            args = (*args, *kwargs.values())
        for production in entry.productions:
            more = len(args) - len(production.args)
            if kwargs and (production.rest is None or more < len(kwargs)):
                continue
            if production.is_call != (how == "reduce") or more < 0 or (more and production.rest is None):
                continue
            patterns = (*production.args, *(production.rest,) * more)
            # Most calls have one production and fit it: a loop is faster than expressions.
            for pattern, arg in zip(patterns, args, strict=True):
                if pattern is None or not pattern(self, arg):
                    break
            else:
                return True
        return False

    def _is_grave(self, name: Global, args: tuple[Any, ...], how: str) -> bool:
        """Return whether a call outside the grammar may do more than a constructor that keeps its arguments."""
        today = current(name)
        if today in _INERT:
            return not _is_inert(today.name, args)
        if today.name.rpartition(".")[2].startswith("__pyx_unpickle_"):
            # Cython's function for an object of a class, which is its first argument.
            return not _data(self, args[1:])
        if not is_class(today):
            return self._entry(name) is None or not all(_data(self, arg) for arg in args)
        if how == "reduce" and today.module.partition(".")[0] in _EVALUATING and args:
            return True
        return not self._is_plain(args)

    def _is_plain(self, args: tuple[Any, ...]) -> bool:
        """Return whether arguments are data and reviewed objects."""
        return all(
            _data(self, arg)
            or (type(arg) is Global and self.is_value(arg))
            or (
                type(arg) is Opaque
                and type(arg.cls) is Global
                and self._entry(arg.cls) is not None
                and not self.is_function(arg)
            )
            for arg in args
        )

    def build(self, target: Opaque, state: Any) -> None:
        """Judge the state that an object gets."""
        known = self._of(target)
        is_allowed = False
        for production in known if not target.state else ():
            if production.state and production.state(self, state):
                is_allowed = True
                break
        if is_allowed and not _calls_by_name(state):
            self._entered.pop(id(state), None)
            return
        name = resolved(target.cls)
        called = f"the contents of the state of {brief(target.name, 200)[1:-1]}"
        if target.state:
            self.unknown_calls[f"{called}, which is set twice"] = None
        elif _calls_by_name(state):
            self.unknown_calls[called] = None
        else:
            self.unknown[name or UNKNOWN_VALUE] = None
            is_evaluated = type(state) is dict and not _EVALUATED.isdisjoint(key for key in state if type(key) is str)
            if is_evaluated or (any(production.is_typed for production in known) and not self._holds_values(state)):
                self.unknown_calls[called] = None
        # Unpicklers copy the content of a state.
        self._entered.pop(id(state), None)

    def _holds_values(self, state: Any) -> bool:
        """Return whether a state holds only names and values, no function."""
        parts = state if type(state) is tuple else (state,)
        return all(
            _held(self, (*part.values(),)) and all(map(is_name, part)) if isinstance(part, dict) else _held(self, part)
            for part in parts
        )

    def _of(self, target: Opaque) -> tuple[Production, ...]:
        entry = self._entry(target.cls)
        return (
            tuple([production for production in entry.productions if production.is_call == (target.call == "reduce")])
            if entry
            else ()
        )

    def items(self, target: Any, items: list[Any]) -> None:
        """Judge keys and values, in turns, that are set in `target`."""
        self._change(target, items)
        if type(target) is Opaque:
            self._add(target, items, [production.items for production in self._of(target) if production.items])

    def append(self, target: Any, items: list[Any]) -> None:
        """Judge values that are appended, or added to a set."""
        self._change(target, items)
        if type(target) is Opaque:
            self._add(target, items, [(production.append,) for production in self._of(target) if production.append])

    def _change(self, target: Any, items: list[Any]) -> None:
        self.put(items)
        if id(target) in self._entered and items:
            self.unknown_calls["an object whose list or dict is changed later"] = None

    def _add(self, target: Opaque, items: list[Any], known: Sequence[tuple[Pattern, ...]]) -> None:
        """Judge items that are added to an object. `known`: patterns for the items, in turns."""
        if not target.state and any(
            all(patterns[at % len(patterns)](self, item) for at, item in enumerate(items)) for patterns in known
        ):
            return
        name = resolved(target.cls)
        if target.state or name is None or self._entry(name) is not None or not is_class(name):
            self.unknown_calls[f"items added to {brief(target.name, 200)[1:-1]}"] = None
        else:
            self.unknown[name] = None

    def _functions_in(self, value: Any) -> None:
        todo = [value]
        while todo and len(self.unknown) < 1000:
            value = todo.pop()
            if type(value) is tuple:
                if not self.enter(value):
                    break
                todo += value
            elif type(value) is Global and not self.is_held(value):
                self.unknown[value] = None
            elif type(value) is Opaque and self.is_function(value):
                root: Any = value
                while type(root) is Opaque:
                    root = root.cls
                self.unknown[root if type(root) is Global else UNKNOWN_VALUE] = None


def _is_inert(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a function of `_INERT` calls none of its arguments."""
    if name == "getattr":
        return len(args) == 2 and type(args[1]) is str and is_name(args[1])
    if name in ("iter", "type"):
        return len(args) == 1
    return bool(args) and type(args[0]) is Global


def _calls_by_name(state: Any) -> bool:
    """Return whether a state holds a callable under a name that unpicklers call."""
    return any(
        name in CALLED_BY_NAME and type(part[name]) in (Global, Opaque)
        for part in (state if type(state) is tuple else (state,))
        if isinstance(part, dict)
        for name in part.keys() & CALLED_BY_NAME
    )
