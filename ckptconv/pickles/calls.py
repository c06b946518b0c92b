"""The names in a pickle, and the objects that it makes by calling them: nothing that is named is imported or called.

A name stays a name. It is looked up, by exact match, in the tables of a `Vocabulary`; a call of any other name becomes
an `Opaque`, which records it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

from ckptconv.errors import CorruptError
from ckptconv.pickles import watching
from ckptconv.pickles.containers import BUILTINS, CONSTANTS, PYTHON, TAKES_ARGUMENTS, Constructors, Keys
from ckptconv.pickles.nodes import (
    CALL_DEPTH,
    Global,
    NumpyArray,
    NumpyScalar,
    Opaque,
    Replaced,
    Size,
    TorchConstant,
    become,
    today,
)
from ckptconv.pickles.refusing import suspects
from ckptconv.pickles.vocabulary import (
    Builder,
    Constructor,
    ExcessiveError,
    Limits,
    MalformedError,
    OddError,
    Phrases,
    Vocabulary,
)
from ckptconv.text import brief

_BUILT_IN_PLACE = (OrderedDict, Counter)
# Functions by which protocols 0 and 1 make objects. What they make is judged.
_HELPERS = frozenset(("copyreg", name) for name in ("_reconstructor", "__newobj__", "__newobj_ex__"))
# A placeholder of the function of a reader that finds data outside of the pickle.
_PERSISTENT = Global("pickle", "persistent_load")
_OBJECTS = tuple(Global(module, "object") for module in BUILTINS)
# No real module or name is longer.
_LONGEST_NAME = 1000
# The charge for values that a call makes by copying its arguments, which may be of any size. Arguments may be shared,
# and each call takes only a few bytes of the pickle.
_SIZES: dict[type, Callable[[Any], int]] = {
    NumpyArray: lambda array: len(array.data),
    NumpyScalar: lambda scalar: len(scalar.data),
    Size: lambda size: 8 * len(size),
    TorchConstant: lambda constant: len(constant.name),
}
# Bytes of such values, or characters of a name, that are charged as one object; and arguments of a call.
_BYTES_EACH, _ARGUMENTS_EACH = 64, 16


class Calls:
    """The names and objects of one pickle of `size` bytes, and the values that it works on: `stack`, and `memo`."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits, size: int) -> None:
        self.vocabulary = vocabulary
        self.limits = limits
        self.keys = Keys(limits, size)
        self.constructors = Constructors(self.keys, self.charge)
        self.constants: dict[tuple[str, str], Any] = {**CONSTANTS, **vocabulary.constants}
        self.builders: Mapping[tuple[str, str], Builder] = vocabulary.builders
        self.enums = vocabulary.enums
        self.persistent = vocabulary.persistent or self._opaque_persistent
        # The number of further containers and objects. An empty one is a byte or two, and takes hundreds in memory.
        self.room = limits.objects + size // 4
        self.stack: list[Any] = []
        # Picklers number entries in order, so a list holds them. An entry with an index beyond the end of the list goes
        # to `spill`, and moves to the list when the list reaches that index.
        self.memo: list[Any] = []
        self.spill: dict[int, Any] = {}
        # For objects that are complete only with their state, by identity: the memo index that they will get.
        self.places: dict[int, int] = {}
        # The names mentioned; the constant of a name, if it is more than a name; and the constructors of names.
        self.globals: dict[tuple[str, str], Global] = {}
        self.meanings: dict[tuple[str, str], Any] = {}
        self.known: dict[Global, Constructor] = {}
        # Names whose calls need a BUILD to give a value; and names whose `__new__` may take arguments.
        self.unfinished: set[Global] = set()
        self.takes_arguments: set[Global] = set()
        self.opaque: dict[Global, None] = {}
        self.suspects: dict[Global, None] = {}
        # The judge of the objects, if there is a watcher.
        self.judge = watching.judge(size)
        # Reads sequences of opcodes at once; for a reader that keeps no values.
        self.phrases: Phrases | None = None
        # The first oddity that Python's unpicklers may read differently. The pickle is refused for it at the end, when
        # it is known whether the rest contains an attack.
        self.oddity: CorruptError | None = None

    def _is_known(self, module: str, name: str) -> bool:
        """Return whether a dotted name is that of a constructor or constant, wherever its module part ends."""
        tables, steps = (PYTHON, self.vocabulary.constructors, self.constants), f"{module}.{name}".split(".", 8)
        splits = [(".".join(steps[:at]), ".".join(steps[at:])) for at in range(1, len(steps))]
        return not all(table.keys().isdisjoint(splits) for table in tables)

    def odd(self, reason: str) -> None:
        """Record `reason` to refuse the pickle for at its end, and read on."""
        raise NotImplementedError

    def skip_embedded(self, target: Opaque) -> None:
        """Continue after the bytes that `target` stands for, if any."""
        raise NotImplementedError

    def charge(self, count: int) -> None:
        """Count `count` objects as made; a large one counts several times. Raise ExcessiveError for too many."""
        self.room -= count
        if self.room < 0:
            raise ExcessiveError("creates more objects than its length allows")

    def find(self, module: Any, name: Any) -> Any:
        """Return the value of a name: a constant, or a `Global`, which is just the name."""
        if type(module) is not str or type(name) is not str:
            raise MalformedError("has a class name that is not text")
        key = module, name
        known = self.globals.get(key)
        if known is None:
            known = self._mention(key)
        return self.meanings.get(key, known) if self.meanings else known

    def _mention(self, key: tuple[str, str]) -> Global:
        """Look up a name that the pickle has not mentioned before."""
        module, name = key
        mentioned = Global(module[: _LONGEST_NAME + 1], name[: _LONGEST_NAME + 1])
        # A Python 2 name also means its Python 3 successor.
        for spelled in dict.fromkeys((key, today(key))):
            if spelled in self.constants:
                self.meanings.setdefault(key, self.constants[spelled])
            construct = self.constructor(spelled)
            if construct is not None:
                self.known.setdefault(mentioned, construct)
            if construct is None and spelled not in self.constants and spelled not in self.vocabulary.classes:
                # No name that the vocabulary knows is suspect.
                self.suspects.update(dict.fromkeys(suspects("of_name", mentioned, Global(*spelled))))
            if spelled in self.builders:
                self.unfinished.add(mentioned)
            if spelled in TAKES_ARGUMENTS:
                self.takes_arguments.add(mentioned)
        is_judged = key not in self.meanings and key not in PYTHON and today(key) not in _HELPERS
        if self.judge and is_judged and not self._is_of_script(mentioned):
            self.judge.mention(mentioned)
        if max(len(module), len(name)) > _LONGEST_NAME:
            # Python finds no module with a null byte in its name, and reads no further.
            kind = MalformedError if "\0" in module.partition(".")[0] else ExcessiveError
            raise kind(f"has a class name of {max(len(module), len(name))} characters, more than {_LONGEST_NAME}")
        if mentioned not in self.known and key not in self.meanings and self._is_known(module, name):
            # Python resolves dots in the name as attributes. torch compares the joined path, wherever the module ends.
            self.odd(f"refers to {brief(mentioned)} with a different split into module and name")
        self.charge(1 + (len(module) + len(name)) // _BYTES_EACH)
        self.globals[key] = mentioned
        return mentioned

    def _is_of_script(self, name: Any) -> bool:
        """Return whether a class is one of the program that comes with the pickle."""
        return type(name) is Global and self.enums is not None and name.module.partition(".")[0] == self.enums

    def constructor(self, name: tuple[str, str]) -> Constructor | None:
        """Return the constructor of the value of a call of `name`: the vocabulary's, else that of Python's types."""
        construct = self.vocabulary.constructors.get(name)
        return PYTHON[name](self.constructors) if construct is None and name in PYTHON else construct

    def call(self, function: Any, args: Any, how: str, kwargs: dict[str, Any] | None = None) -> Any:
        """Return the value of a call, or an `Opaque` that records it."""
        self.charge(1)
        if type(args) is not tuple:
            if type(args) is Size:
                args = tuple(args)
            elif type(function) is Global and function.module.partition(".")[0] == self.enums:
                args = (args,)
            else:
                if type(function) is Global:
                    # Python's unpickler in Python takes them.
                    self.opaque[function] = None
                raise MalformedError("calls something with arguments that are not a tuple")
        if len(args) > _ARGUMENTS_EACH:
            self.charge(len(args) // _ARGUMENTS_EACH)
        judge = self.judge
        if type(function) is Global:
            construct = self.known.get(function)
            if construct is not None:
                if how != "reduce" and (args or kwargs) and (kwargs or function not in self.takes_arguments):
                    self.odd(f"makes a {brief(function)} with arguments, but without calling it")
                try:
                    value = construct(args)
                except OddError as reason:
                    if not any(type(arg) is Opaque for arg in args):
                        self.odd(str(reason))
                    value = NotImplemented
                if value is not NotImplemented:
                    if judge and today((function.module, function.name)) in PYTHON:
                        judge.put(args)
                    elif judge:
                        judge.call(function, args, how, kwargs)
                    kind = type(value)
                    if kind in _SIZES:
                        self.charge(_SIZES[kind](value) // _BYTES_EACH)
                    elif kind is Opaque and function in self.unfinished:
                        self._note_place(value)
                    return value
            elif function.module in ("copyreg", "copy_reg"):
                direct = _as_newobj(function.name, args)
                if direct is not None:
                    return self.call(direct[0], direct[1], "newobj_ex" if direct[2] else "newobj", direct[2])
            self.opaque[function] = None
        elif type(function) is Opaque:
            inner: Any = function
            for _ in range(CALL_DEPTH):
                if type(inner) is not Opaque:
                    break
                inner = inner.cls
            else:
                raise ExcessiveError(f"calls results of calls more than {CALL_DEPTH} levels deep")
        else:
            raise MalformedError(f"calls a value of type {type(function).__name__}")
        self.suspects.update(dict.fromkeys(suspects("of_call", function, args)))
        if judge and not self._is_of_script(function):
            judge.call(function, args, how, kwargs)
        result = Opaque(function, args, kwargs, how)
        if type(function) is Global and function in self.unfinished:
            self._note_place(result)
        return result

    def _note_place(self, result: Opaque) -> None:
        """Remember the memo index that `result` will get: picklers store an object as soon as they have made it."""
        self.places[id(result)] = len(self.memo) + len(self.spill)

    def build(self, state: Any) -> None:
        """Give the object on top of the stack its state, as BUILD does."""
        target = self.stack[-1]
        kind = type(target)
        if kind is Opaque:
            if self.judge and not self._is_of_script(target.cls):
                self.judge.build(target, state)
            builder = self.builders.get((target.cls.module, target.cls.name)) if type(target.cls) is Global else None
            value = builder(target, state) if builder else NotImplemented
            place = self.places.pop(id(target), -1)
            if value is NotImplemented:
                target.state.append(state)
                if self.vocabulary.embedded:
                    self.skip_embedded(target)
                if builder:
                    self.opaque[target.cls] = None
            elif type(value) is NumpyArray:
                self.charge(len(value.data) // _BYTES_EACH)
                become(target, value)
            elif value is not target:
                self._replace(target, value, place)
        elif kind in _BUILT_IN_PLACE:
            if type(state) is tuple and len(state) == 2 and state[1] is None:
                state = state[0]
            if type(state) is not dict:
                self.odd(f"gives a value of type {kind.__name__} a state that is not a dictionary")
                return
            # Several objects may share a state, and each copies it.
            self.charge(len(state))
            if self.judge:
                self.judge.put(state.values())
            for name in state:
                # `__setstate__` is refused too: Python would call it with the next state.
                if type(name) is not str or hasattr(kind, name) or name.startswith("__"):
                    self.odd(f"sets attribute {brief(name)} of a value of type {kind.__name__}")
                    return
            target.__dict__.update(state)
        else:
            self.odd(f"gives a state to a value of type {kind.__name__}")

    def forget_phrases(self) -> None:
        if self.phrases is not None:
            self.phrases.forget()

    def _replace(self, old: Any, new: Any, place: int) -> None:
        """Put `new` where `old` is: on the stack, and at memo index `place` if `old` was stored there when it was made.

        With every pickler, nothing else refers to `old`. If something does, `check_nesting` finds a `Replaced` and
        refuses.
        """
        old.__class__ = Replaced
        self.stack[-1] = new
        if 0 <= place < len(self.memo):
            if self.memo[place] is old:
                self.memo[place] = new
                self.forget_phrases()
        elif self.spill.get(place) is old:
            self.spill[place] = new

    def set_items(self, target: Any, items: list[Any]) -> None:
        """SETITEM, SETITEMS: `items` is key, value, key, value …"""
        if len(items) % 2:
            raise MalformedError("sets a key without a value")
        pairs = zip(items[::2], items[1::2], strict=True)
        if self.judge:
            self.judge.items(target, items)
        if isinstance(target, dict):
            self.keys.fill(target, pairs)
        elif type(target) is Opaque:
            target.items.extend(pairs)
        else:
            self.odd(f"sets an item of a value of type {type(target).__name__}")

    def append(self, target: Any, items: list[Any]) -> None:
        if self.judge:
            self.judge.append(target, items)
        if type(target) is list:
            target.extend(items)
        elif type(target) is deque:
            self.constructors.others.deques.extend(target, items)
        elif type(target) is Opaque:
            target.appended.extend(items)
        else:
            self.odd(f"appends to a value of type {type(target).__name__}")

    def _opaque_persistent(self, pid: Any) -> Any:
        if self.judge:
            self.judge.call(_PERSISTENT, (pid,), "reduce", None)
        return Opaque(_PERSISTENT, pid, None, "persistent")


def _as_newobj(name: str, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any] | None] | None:
    """Return class, arguments and keywords of an object made by a helper of `copyreg` (protocols 0, 1), or None."""
    if name == "_reconstructor" and len(args) == 3 and args[1] in _OBJECTS and args[2] is None:
        cls, arguments, kwargs = args[0], (), None
    elif name == "__newobj__" and args:
        cls, arguments, kwargs = args[0], args[1:], None
    elif name == "__newobj_ex__" and len(args) == 3 and type(args[1]) is tuple and is_kwargs(args[2]):
        cls, arguments, kwargs = args
    else:
        return None
    return (cls, arguments, kwargs) if type(cls) is Global and cls.module not in ("copyreg", "copy_reg") else None


def is_kwargs(value: Any) -> bool:
    return type(value) is dict and all(type(name) is str for name in value)
