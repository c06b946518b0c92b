"""Judges, instruction by instruction, what a pickle makes: a production of the grammar allows it, or it is unknown.

A name alone is worth nothing: a class or function is known with the arguments, the state and the items that its own
pickling writes. Everything is judged when Python would do it, with the values of that moment; what counted for a
verdict may not be changed afterwards.
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

# How many parts of values are looked at in a pickle, beside as many as it has bytes; and containers that may count.
_STEPS, _COUNTING = 2_000_000, 50_000
# Bytes that a call may copy, as many as are looked at with one part of a value.
_BYTES_A_STEP = 8
# Calls that make a function of what they are given, and do not call it.
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
# Packages with classes that evaluate text that they are made of.
_EVALUATING = frozenset({"asteval", "jinja2", "mako", "numexpr", "simpleeval", "sympy", "typing", "typing_extensions"})
# Names of attributes whose text is evaluated when an object gets its state.
_EVALUATED = frozenset({"_parse_arg_template", "restore_design_info", "restore_model_spec"})
# Attributes that unpicklers look up in an object, and call with what the pickle says.
CALLED_BY_NAME = frozenset({"__setstate__", "__class__", "__reduce_ex__", "__getinitargs__", "add", "append", "extend"})
_held, _any, _data = _KINDS["held"], _KINDS["any"], _KINDS["data"]


def is_reviewed(name: Global) -> bool:
    """Whether the grammar has a production for a name."""
    return grammar().entry(name) is not None


class Judge:
    """What nobody has reviewed in one pickle: `unknown` names, and `unknown_calls`, in words."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        # What is known of each name that was met. A pickle has one `Global` for all mentions of a name.
        self._known: dict[Global, Entry | None] = {}
        self.unknown: dict[Global, None] = {}
        self.unknown_calls: dict[str, None] = {}
        # What functions get as arguments that were allowed, and are bytes: some load them.
        self.bytes_given: list[tuple[Global, bytes | bytearray]] = []
        self._steps = _STEPS + size
        # By identity: containers that counted for a verdict.
        self._entered: dict[int, Any] = {}

    # ---- what patterns ask

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

    def is_data(self, made: Opaque) -> bool:
        entry = self._entry(made.cls)
        return entry is not None and entry.is_data

    def is_function(self, made: Opaque) -> bool:
        name = resolved(made.cls)
        if name is not None and name.name not in _INERT_NAMES:
            return False
        if name is None or current(name) == GETATTR:
            attribute = resolved(made)
            return attribute is None or not (self.is_held(attribute) or self._is_member(made))
        return current(name) in _INERT

    def _is_member(self, made: Opaque) -> bool:
        """Whether `getattr` fetches a member of an enumeration."""
        entry = self._entry(made.args[0]) if type(made.args[0]) is Global else None
        return entry is not None and entry.is_value and entry.is_data and made.args[1].isupper()

    def _entry(self, function: Any) -> Entry | None:
        """Return what is known of what is called; None if nothing is."""
        name = function if type(function) is Global else resolved(function)
        if name is None:
            return None
        try:
            return self._known[name]
        except KeyError:
            self._known[name] = entry = grammar().entry(name)
            return entry

    # ---- what the machine does

    def mention(self, name: Global) -> None:
        """A class or function is named, which imports its module."""
        if self._entry(name) is None and current(name) not in _INERT:
            self.unknown[name] = None

    def put(self, values: Iterable[Any]) -> None:
        """Values are put into a list, a set or a dict, or are what the pickle is."""
        for value in values:
            kind = type(value)
            if (kind is tuple or kind is Global or kind is Opaque) and not _held(self, value):
                self._functions_in(value)

    def call(self, function: Any, args: tuple[Any, ...], how: str, kwargs: dict[str, Any] | None) -> None:
        """Something is called, or an object is made without arguments."""
        name = function if type(function) is Global else resolved(function)
        if name is None:
            root = function
            while type(root) is Opaque:
                root = root.cls
            self.unknown_calls[f"what {brief(root, 200)} returns"] = None
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
            # They may be what any number of further arguments may be.
            args = (*args, *kwargs.values())
        for each in entry.productions:
            more = len(args) - len(each.args)
            if kwargs and (each.rest is None or more < len(kwargs)):
                continue
            if each.is_call != (how == "reduce") or more < 0 or (more and each.rest is None):
                continue
            patterns = (*each.args, *(each.rest,) * more)
            # Most calls have one production and are of it: a loop is quicker than expressions.
            for pattern, arg in zip(patterns, args, strict=True):
                if pattern is None or not pattern(self, arg):
                    break
            else:
                return True
        return False

    def _is_grave(self, name: Global, args: tuple[Any, ...], how: str) -> bool:
        """Whether a call that no production allows may run more than a constructor that keeps what it is given."""
        today = current(name)
        if today in _INERT:
            return not _is_inert(today.name, args)
        if today.name.rpartition(".")[2].startswith("__pyx_unpickle_"):
            # Cython's function to make an object of a class, which is its first argument.
            return not _data(self, args[1:])
        if not is_class(today):
            return self._entry(name) is None or not all(_data(self, arg) for arg in args)
        if how == "reduce" and today.module.partition(".")[0] in _EVALUATING and args:
            return True
        return not self._is_plain(args)

    def _is_plain(self, args: tuple[Any, ...]) -> bool:
        """Whether arguments are data and objects that were reviewed."""
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
        """An object is given its state."""
        known = self._of(target)
        is_allowed = False
        for each in known if not target.state else ():
            if each.state and each.state(self, state):
                is_allowed = True
                break
        if is_allowed and not _calls_by_name(state):
            self._entered.pop(id(state), None)
            return
        name = resolved(target.cls)
        what = f"what is in the state of {brief(target.name, 200)[1:-1]}"
        if target.state:
            self.unknown_calls[f"{what}, which it is given twice"] = None
        elif _calls_by_name(state):
            self.unknown_calls[what] = None
        else:
            self.unknown[name or UNKNOWN_VALUE] = None
            is_evaluated = type(state) is dict and not _EVALUATED.isdisjoint(key for key in state if type(key) is str)
            if is_evaluated or (any(each.is_typed for each in known) and not self._holds_values(state)):
                self.unknown_calls[what] = None
        # Unpicklers copy what is in it.
        self._entered.pop(id(state), None)

    def _holds_values(self, state: Any) -> bool:
        """Whether a state holds names and values, and no function."""
        parts = state if type(state) is tuple else (state,)
        return all(
            _held(self, (*part.values(),)) and all(map(is_name, part)) if isinstance(part, dict) else _held(self, part)
            for part in parts
        )

    def _of(self, target: Opaque) -> tuple[Production, ...]:
        entry = self._entry(target.cls)
        return tuple([each for each in entry.productions if each.is_call == (target.call == "reduce")]) if entry else ()

    def items(self, target: Any, items: list[Any]) -> None:
        """Keys and values, which take turns, are set."""
        self._change(target, items)
        if type(target) is Opaque:
            self._add(target, items, [each.items for each in self._of(target) if each.items])

    def append(self, target: Any, items: list[Any]) -> None:
        """Values are appended, or added to a set."""
        self._change(target, items)
        if type(target) is Opaque:
            self._add(target, items, [(each.append,) for each in self._of(target) if each.append])

    def _change(self, target: Any, items: list[Any]) -> None:
        self.put(items)
        if id(target) in self._entered and items:
            self.unknown_calls["what was given a list or dict that is changed afterwards"] = None

    def _add(self, target: Opaque, items: list[Any], known: Sequence[tuple[Pattern, ...]]) -> None:
        """Judge what is added to an object. `known`: patterns for the items, which take turns."""
        if not target.state and any(
            all(each[at % len(each)](self, item) for at, item in enumerate(items)) for each in known
        ):
            return
        name = resolved(target.cls)
        if target.state or name is None or self._entry(name) is not None or not is_class(name):
            self.unknown_calls[f"what adds to {brief(target.name, 200)[1:-1]}"] = None
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
    """Whether a function of `_INERT` calls nothing of what it is given."""
    if name == "getattr":
        return len(args) == 2 and type(args[1]) is str and is_name(args[1])
    if name in ("iter", "type"):
        return len(args) == 1
    return bool(args) and type(args[0]) is Global


def _calls_by_name(state: Any) -> bool:
    """Whether a state holds a callable under a name that unpicklers call."""
    return any(
        name in CALLED_BY_NAME and type(part[name]) in (Global, Opaque)
        for part in (state if type(state) is tuple else (state,))
        if isinstance(part, dict)
        for name in part.keys() & CALLED_BY_NAME
    )
