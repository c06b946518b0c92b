"""The inert pickle machine: it reads a pickle into a plain tree and runs nothing.

A pickle is a program for a small stack machine. Some opcodes name a class or function, and others call it: that is how
Python, when it loads a pickle, runs whatever the author wanted. Here a name stays a name. The machine looks it up, by
exact match, in tables of what is understood as data (`Vocabulary`). A call of any other name becomes an `Opaque` node
that records the call. The machine imports nothing, and calls nothing that a pickle names.

The machine understands all opcodes of protocols 0 to 5, as documented in CPython's `Lib/pickletools.py`. It refuses
out-of-band buffers (protocol 5) and the extension registry, because they need things that a file does not hold. It also
refuses whatever CPython's C unpickler, its Python unpickler and torch's for `weights_only` read differently: numbers
that no pickler writes so, arguments that go beyond their frame, and calls with arguments that no pickler passes.

Time and memory are proportional to the length of the pickle: every length and index in it is checked before use, and
nothing recurses.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import math
import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CkptconvError, CorruptError, LimitError, UnsupportedError
from ckptconv.pickles import attacks
from ckptconv.pickles.containers import (
    BUILTINS,
    CONSTANTS,
    PYTHON,
    SET_COST,
    TAKES_ARGUMENTS,
    Deques,
    Keys,
    Made,
    today,
)
from ckptconv.pickles.fastpath import HOLE
from ckptconv.pickles.limits import check_nesting
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
)
from ckptconv.pickles.refusing import attacks_are_refused
from ckptconv.pickles.vocabulary import (
    DEFAULT_LIMITS,
    PLAIN,
    Builder,
    Constructor,
    ExcessiveError,
    Limits,
    MalformedError,
    OddError,
    Phrases,
    RefusedError,
    TruncatedError,
    Vocabulary,
)
from ckptconv.process import no_garbage
from ckptconv.text import brief


class Loaded(NamedTuple):
    """What a pickle says: its `value`; the position `end` after it; every class and function that it mentions, in order
    of first mention; and those of them that it calls and that were kept as `Opaque`."""

    value: Any
    end: int
    globals: tuple[Global, ...]
    opaque: tuple[Global, ...]


def load(
    data: bytes | memoryview,
    vocabulary: Vocabulary = PLAIN,
    *,
    where: str,
    start: int = 0,
    limits: Limits = DEFAULT_LIMITS,
) -> Loaded:
    """Read the pickle that begins at byte `start` of `data`. `where` names it in errors.

    Raises TruncatedError if the data ends too early, CorruptError if it is not a valid pickle, LimitError if it exceeds
    `limits`, and UnsupportedError if only a running Python could provide what it needs. If attacks are refused
    (`refusing_attacks`), raises UnsafeError for one, broken or not: some attacks run before the pickle breaks.
    """
    data = bytes(data)
    with no_garbage():
        try:
            return _run(_Machine(data, vocabulary, where, start, limits, lean=True))
        except _NotStoredError:
            return _run(_Machine(data, vocabulary, where, start, limits, lean=False))


def _run(machine: _Machine) -> Loaded:
    try:
        loaded = machine.run()
    except TruncatedError:
        # Callers read truncated data again, with more of it, so it does not count as broken.
        machine.tell(broken=True)
        machine.refuse_attack()
        raise
    except CkptconvError as error:
        machine.tell(broken=True)
        machine.refuse_attack(broken=True)
        if machine.around and attacks_are_refused():
            _run_on(machine)
        raise machine.oddity or error from None
    else:
        machine.tell(loaded.value)
        machine.refuse_attack()
        return loaded
    finally:
        # The machine is in reference cycles, so it and the data would stay until the next garbage collection.
        vars(machine).clear()


def _run_on(machine: _Machine) -> None:
    """Look for an attack in a pickle that breaks in a frame. Ignore frames, as CPython's C unpickler ignores some."""
    vocabulary, where, limits = machine.vocabulary, machine.where, machine.limits
    whole, _, base = machine.around or (machine.data, 0, 0)
    again = _Machine(whole, vocabulary, where, 0 if base else machine.start, limits, lean=False, framed=False)
    try:
        with contextlib.suppress(CkptconvError):
            again.run()
        again.tell(broken=True)
        again.refuse_attack(broken=True)
    finally:
        vars(again).clear()


# --------------------------------------------------------------------------------------------------------- machine


class _NotStoredError(Exception):
    """The pickle refers to a memo entry that a lean run did not keep, or that does not exist."""


_BUILT_IN_PLACE = (OrderedDict, Counter)
# Functions by which protocols 0 and 1 make objects. What they make is judged.
_HELPERS = frozenset(("copyreg", name) for name in ("_reconstructor", "__newobj__", "__newobj_ex__"))
# Stands for the function of a reader that finds what lies outside of the pickle.
_PERSISTENT = Global("pickle", "persistent_load")
_OBJECTS = tuple(Global(module, "object") for module in BUILTINS)
# No real module or name is longer.
_LONGEST_NAME = 1000
# What to charge for values that a call makes by copying its arguments, which may be of any size. Arguments may be
# shared, and each call takes only a few bytes of the pickle.
_SIZES: dict[type, Callable[[Any], int]] = {
    NumpyArray: lambda array: len(array.data),
    NumpyScalar: lambda scalar: len(scalar.data),
    Size: lambda size: 8 * len(size),
    TorchConstant: lambda constant: len(constant.name),
}
# Bytes of such values, or characters of a name, that are charged as one object; and arguments of a call.
_BYTES_EACH, _ARGUMENTS_EACH = 64, 16
# Not a pickle opcode: the machine appends it to the bytes of a frame.
_END_OF_FRAME = b"\0"
# Python itself reads integers of no more digits.
_MAX_DIGITS = 4300
# Numbers in text, as picklers write them. CPython's two unpicklers accept other forms, each its own.
_WHOLE = re.compile(rb"0|-?[1-9][0-9]*")
_REAL = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
# Valid escapes in strings; group 1 is a backslash that begins none.
_ESCAPES = re.compile(rb"\\(?:[\\'\"abfnrtv\n]|[0-3]?[0-7]{1,2}(?![0-7])|[0-3][0-7]{2}|x[0-9a-fA-F]{2})|(\\)")
# As numbers are spelled that have no digits. Each NaN is an object, and a key, of its own.
_SPECIAL = frozenset((b"inf", b"-inf", b"nan"))
# Values that are hardly ever referred to again, by the opcodes that follow. A tuple before REDUCE and BINPERSID is the
# arguments of a call, or a persistent id; before numbers, bools and tuples it is the size or stride of a tensor.
_ONCE: dict[type, frozenset[int]] = {tuple: frozenset(b"RQKMJ()\x88\x89"), OrderedDict: frozenset(b"t")}

_u16 = struct.Struct("<H").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_f64 = struct.Struct(">d").unpack_from


class _Machine:
    """One run over one pickle.

    A lean run does not keep in the memo what Python's pickler always stores there and hardly ever fetches: the tuples
    that describe a tensor, and the empty OrderedDict of its hooks. In a file of a million tensors, these are most of
    the memory. If a pickle does refer to one, `load` reads it again with a full memo.
    """

    def __init__(
        self,
        data: bytes,
        vocabulary: Vocabulary,
        where: str,
        start: int,
        limits: Limits,
        *,
        lean: bool,
        framed: bool = True,
    ) -> None:
        self.vocabulary = vocabulary
        # `data` is what is read now: the whole pickle, or one frame. In a frame, `around` is the data and the position
        # to continue with after it, and `base` is where the frame begins in that data.
        self.data, self.size = data, len(data)
        self.pos = self.start = start
        self.base = 0
        self.around: tuple[bytes, int, int] | None = None
        self.framed = framed
        self.short = False
        self.where = where
        self.limits = limits
        self.lean = lean
        self.keys = Keys(limits, len(data) - start)
        self.deques = Deques(self.charge)
        self.made = Made(self.keys, self.deques, self.charge)
        self.constants: dict[tuple[str, str], Any] = {**CONSTANTS, **vocabulary.constants}
        self.builders: Mapping[tuple[str, str], Builder] = vocabulary.builders
        self.enums = vocabulary.enums
        self.persistent = vocabulary.persistent or self._opaque_persistent
        # How many more containers and objects may be made. An empty one is a byte or two, and takes hundreds in memory.
        self.room = limits.objects + (len(data) - start) // 4
        self.stack: list[Any] = []
        # Stacks below the marks; MARK starts a new stack.
        self.marks: list[list[Any]] = []
        # Picklers number entries in order, so a list holds them. An entry with an index beyond the end of the list goes
        # to `spill`, and moves to the list when the list reaches that index.
        self.memo: list[Any] = []
        self.spill: dict[int, Any] = {}
        # For objects that are complete only with their state, by identity: the memo index that they will get.
        self.places: dict[int, int] = {}
        # The names mentioned; what a name stands for, if that is more than a name; and the constructors of names.
        self.globals: dict[tuple[str, str], Global] = {}
        self.meanings: dict[tuple[str, str], Any] = {}
        self.known: dict[Global, Constructor] = {}
        # Names of which a call needs a BUILD to make a value; and names whose `__new__` may take arguments.
        self.unfinished: set[Global] = set()
        self.takes_arguments: set[Global] = set()
        self.opaque: dict[Global, None] = {}
        self.suspects: dict[Global, None] = {}
        # Who judges what is made, if somebody watches.
        self.judge = attacks.judge(len(data) - start)
        self.phrases: Phrases | None = vocabulary.phrases() if lean and vocabulary.phrases else None
        # The first thing that Python's unpicklers may read differently. The pickle is refused for it at the end, when
        # it is known whether what follows contains an attack.
        self.oddity: CorruptError | None = None

    # ---- running

    def run(self) -> Loaded:
        """Read the pickle. Turn whatever is wrong with it into an error that gives the position."""
        try:
            value = self._loop()
            if self.judge:
                self.judge.put((value,))
            if self.around and self.pos < self.size:
                # CPython's C unpickler skips the rest of the frame, in which the next pickle may begin.
                self.odd("ends before its frame does")
            self.memo.clear()
            end = self.base + self.pos
            if self.oddity:
                raise self.oddity
            self.keys.check()
            # References to shared parts take few bytes, so a walk could be far longer than the pickle.
            length, most = end - self.start, self.limits.objects
            check_nesting(value, self.limits, most + 16 * length, most + length // 4)
        except _NotStoredError:
            if self.lean:
                raise
            raise self._error(CorruptError, "refers to an object that it has not stored") from None
        except ExcessiveError as reason:
            raise self._error(LimitError, str(reason)) from None
        except RefusedError as reason:
            raise self._error(UnsupportedError, str(reason)) from None
        except MalformedError as reason:
            raise self._error(CorruptError, str(reason)) from None
        except (IndexError, struct.error) as error:
            # A struct.error always means missing data. An IndexError means that too, or too short a stack.
            if not (isinstance(error, struct.error) or self.short or self.pos >= len(self.data)):
                raise self._error(CorruptError, "takes from the stack what is not there") from None
            if self.around:
                raise self._error(CorruptError, "has an instruction that goes beyond the end of its frame") from None
            size = len(self.data) - self.start
            raise self._error(TruncatedError, f"ends after {size} bytes, unfinished") from None
        return Loaded(value, end, tuple(self.globals.values()), tuple(self.opaque))

    @functools.cached_property
    def paths(self) -> frozenset[str]:
        """The dotted names of all constructors and constants."""
        return frozenset(map(".".join, (*PYTHON, *self.vocabulary.constructors, *self.constants)))

    def refuse_attack(self, *, broken: bool = False) -> None:
        """Raise UnsafeError if attacks are refused and what was read so far is one. `broken`: the pickle is broken."""
        if self.suspects and (self.opaque or broken) and attacks_are_refused():
            raise attacks.error(self.where, self.suspects, self.opaque) from None

    def tell(self, value: Any = None, *, broken: bool = False) -> None:
        """Tell whoever watches what was read so far."""

        def reading() -> attacks.PickleReading:
            names = tuple(self.opaque), tuple(self.suspects)
            judge = self.judge
            unknown = (tuple(judge.unknown), tuple(judge.unknown_calls)) if judge else ((), ())
            return attacks.PickleReading(self.where, *names, *unknown, broken, value)

        attacks.tell(reading)

    def odd(self, reason: str) -> None:
        """Record `reason` to refuse the pickle for at its end, and read on."""
        if self.oddity is None:
            self.oddity = CorruptError(str(self._error(CorruptError, reason)))

    def _error(self, kind: type[CorruptError] | type[UnsupportedError], reason: str) -> CorruptError | UnsupportedError:
        return kind(f"{self.where}: the pickle {reason} (at byte {self.base + min(self.pos, self.size)}).")

    def _loop(self) -> Any:
        """Run the opcodes and return the value.

        A chain of comparisons is most of the work, so ranges divide the opcodes first, and of each range the most
        frequent come first. Those that are rare in checkpoints are in `_RARE`.
        """
        data, pos, size = self.data, self.pos, self.size
        stack, marks, memo, spill = self.stack, self.marks, self.memo, self.spill
        u32, call, phrases, once = _u32, self.call, self.phrases, _ONCE if self.lean else {}
        is_plain = self.judge is None
        begin, opening = (phrases.opening[0], phrases.opening[1:]) if phrases else (-1, b"")
        try:
            while True:
                try:
                    op = data[pos]
                except IndexError:
                    pos += 1  # as behind any instruction
                    raise
                pos += 1
                if op >= 0x80:  # from protocol 2 on
                    if op == 0x94:  # MEMOIZE
                        value = stack[-1]
                        if type(value) in once and data[pos] in once[type(value)]:
                            value = HOLE
                        if spill:
                            # MEMOIZE uses the number of entries as the index, which may be taken.
                            self._put(len(memo) + len(spill), value)
                        else:
                            memo.append(value)
                        continue
                    if op >= 0x8A:
                        if op == 0x8C:  # SHORT_BINUNICODE
                            end = pos + 1 + data[pos]
                            if end > size:
                                raise self._short()
                            stack.append(str(data[pos + 1 : end], "utf-8", "surrogatepass"))
                            pos = end
                            continue
                    elif op == 0x86:  # TUPLE2
                        second = stack.pop()
                        stack[-1] = (stack[-1], second)
                        continue
                    elif op == 0x85:  # TUPLE1
                        stack[-1] = (stack[-1],)
                        continue
                    elif op == 0x81:  # NEWOBJ
                        self.pos = pos
                        args = stack.pop()
                        stack[-1] = call(stack[-1], args, "newobj")
                        continue
                    elif op == 0x89:  # NEWFALSE
                        stack.append(False)
                        continue
                    elif op == 0x88:  # NEWTRUE
                        stack.append(True)
                        continue
                    elif op == 0x87:  # TUPLE3
                        stack[-3:] = ((stack[-3], stack[-2], stack[-1]),)
                        continue
                elif op >= 0x62:
                    if op == 0x68:  # BINGET
                        index = data[pos]
                        pos += 1
                        value = memo[index] if index < len(memo) else self.get(index)
                        if value is HOLE:
                            raise _NotStoredError
                        stack.append(value)
                        continue
                    if op == 0x6A:  # LONG_BINGET
                        index = u32(data, pos)[0]
                        value = memo[index] if index < len(memo) else self.get(index)
                        if value is HOLE:
                            raise _NotStoredError
                        stack.append(value)
                        pos += 4
                        continue
                    if 0x71 <= op <= 0x72:  # BINPUT, LONG_BINPUT
                        if op == 0x72:
                            index = u32(data, pos)[0]
                            pos += 4
                        else:
                            index = data[pos]
                            pos += 1
                        value = stack[-1]
                        if type(value) in once and data[pos] in once[type(value)]:
                            value = HOLE
                        if index == len(memo) and not spill:
                            memo.append(value)
                        else:
                            self._put(index, value)
                        continue
                    if op == 0x75:  # SETITEMS
                        items_list = stack
                        stack = marks.pop()
                        self.pos = pos
                        self._set_items(stack[-1], items_list)
                        continue
                    if op == 0x74:  # TUPLE
                        items = tuple(stack)
                        stack = marks.pop()
                        stack.append(items)
                        continue
                    if op == 0x7D:  # EMPTY_DICT
                        self.charge(1)
                        stack.append({})
                        continue
                    if op == 0x62:  # BUILD
                        self.pos, self.stack = pos, stack
                        self.build(stack.pop())
                        data, pos, size = self.data, self.pos, self.size
                        continue
                    if op == 0x73:  # SETITEM
                        value = stack.pop()
                        key = stack.pop()
                        target = stack[-1]
                        if type(target) is dict and type(key) is str and is_plain:
                            target[key] = value
                        else:
                            self.pos = pos
                            self._set_items(target, [key, value])
                        continue
                    if op == 0x65:  # APPENDS
                        items_list = stack
                        stack = marks.pop()
                        self.pos = pos
                        self._append(stack[-1], items_list)
                        continue
                elif op <= 0x4B:
                    if op == 0x4B:  # BININT1
                        stack.append(data[pos])
                        pos += 1
                        continue
                    if op == begin and data.startswith(opening, pos) and stack and not spill:
                        assert phrases
                        end, cost = phrases.read(data, pos - 1, stack, memo)
                        if cost:
                            self.charge(cost)
                            pos = end
                            continue
                    if op == 0x28:  # MARK
                        marks.append(stack)
                        stack = []
                        continue
                    if op == 0x4A:  # BININT
                        stack.append(_i32(data, pos)[0])
                        pos += 4
                        continue
                    if op == 0x29:  # EMPTY_TUPLE
                        stack.append(())
                        continue
                    if op == 0x47:  # BINFLOAT
                        stack.append(_f64(data, pos)[0])
                        pos += 8
                        continue
                    if op == 0x2E:  # STOP
                        if not stack:
                            raise MalformedError("has no value")
                        return stack.pop()
                elif op == 0x58:  # BINUNICODE
                    end = pos + 4 + u32(data, pos)[0]
                    if end > size:
                        raise self._short()
                    stack.append(str(data[pos + 4 : end], "utf-8", "surrogatepass"))
                    pos = end
                    continue
                elif op == 0x4D:  # BININT2
                    stack.append(_u16(data, pos)[0])
                    pos += 2
                    continue
                elif op == 0x52:  # REDUCE
                    self.pos = pos
                    args = stack.pop()
                    stack[-1] = call(stack[-1], args, "reduce")
                    continue
                elif op == 0x51:  # BINPERSID
                    stack[-1] = self.persistent(stack[-1])
                    continue
                elif op == 0x61:  # APPEND
                    value = stack.pop()
                    self.pos = pos
                    self._append(stack[-1], [value])
                    continue
                elif op == 0x4E:  # NONE
                    stack.append(None)
                    continue
                elif op == 0x5D:  # EMPTY_LIST
                    self.charge(1)
                    stack.append([])
                    continue
                act = _RARE.get(op)
                if act is None:
                    raise MalformedError(f"has an unknown opcode 0x{op:02x}")
                self.pos, self.stack = pos, stack
                act(self)
                data, pos, size, stack = self.data, self.pos, self.size, self.stack
        except UnicodeDecodeError:
            raise MalformedError("has text that is not UTF-8") from None
        finally:
            self.pos, self.stack = pos, stack

    # ---- parts of opcodes

    def _short(self) -> Exception:
        """Return the error for a length that goes beyond the data."""
        self.short = True
        return IndexError()

    def charge(self, count: int) -> None:
        """Count `count` objects as made; a large one counts several times. Raises ExcessiveError if there are too
        many."""
        self.room -= count
        if self.room < 0:
            raise ExcessiveError("makes more objects than its length can be about")

    def enter_frame(self, length: int) -> None:
        """Read the next `length` bytes on their own: no instruction in them may go beyond."""
        if not self.framed:
            return
        if self.around and self.pos < self.size:
            # One of CPython's unpicklers refuses this, and the other reads on.
            self.odd("has a frame in a frame")
            whole, _, base = self.around
            self._read(whole, self.base + self.pos - base, base)
        elif self.around:
            self.leave_frame()
        end = self.pos + length
        if end > self.size:
            raise self._short()
        around = self.data, end, self.base
        self._read(self.data[self.pos : end] + _END_OF_FRAME, 0, self.base + self.pos)
        self.size, self.around = length, around

    def leave_frame(self) -> None:
        assert self.around
        self._read(*self.around)

    def _read(self, data: bytes, pos: int, base: int = 0) -> None:
        """Continue at `pos` of `data`, which begins at `base` of the whole pickle."""
        self.data, self.size, self.pos, self.base, self.around = data, len(data), pos, base, None

    def skip_embedded(self, target: Opaque) -> None:
        """Read on behind the bytes that `target` stands for, if there are some. They follow the frame that it is in."""
        assert self.vocabulary.embedded
        found = self.vocabulary.embedded(target, self.base + (self.size if self.around else self.pos))
        if found is not None:
            if self.around and self.pos < self.size:
                self.odd("has bytes that follow a frame, and goes on in the frame")
            position, data = found
            self._read(data, 0, position)

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes of the pickle."""
        part = self.data[self.pos : self.pos + length]
        if length < 0:
            raise MalformedError("has a negative length")
        if len(part) != length:
            raise self._short()
        self.pos += length
        return part

    def number(self, unpack: Callable[[bytes, int], tuple[Any, ...]], size: int) -> Any:
        value = unpack(self.data, self.pos)[0]
        self.pos += size
        return value

    def line(self) -> bytes:
        """Return the next line, without its newline."""
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            raise self._short()
        line = self.data[self.pos : end]
        self.pos = end + 1
        return line

    def above_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def _put(self, index: int, value: Any) -> None:
        memo, spill = self.memo, self.spill
        if index < len(memo):
            memo[index] = value
            self._forget()
        elif index > len(memo):
            spill[index] = value
        else:
            memo.append(value)
            while len(memo) in spill:
                memo.append(spill.pop(len(memo)))

    def get(self, index: int) -> Any:
        value = self.memo[index] if 0 <= index < len(self.memo) else self.spill.get(index, HOLE)
        if value is HOLE:
            raise _NotStoredError
        return value

    def find(self, module: Any, name: Any) -> Any:
        """Return what a name stands for: a constant, or a `Global`, which is just the name."""
        if type(module) is not str or type(name) is not str:
            raise MalformedError("names a class by something that is not text")
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
            if attacks.is_suspect(Global(*spelled)):
                self.suspects[mentioned] = None
            if spelled in self.constants:
                self.meanings.setdefault(key, self.constants[spelled])
            construct = self.constructor(spelled)
            if construct is not None:
                self.known.setdefault(mentioned, construct)
            if spelled in self.builders:
                self.unfinished.add(mentioned)
            if spelled in TAKES_ARGUMENTS:
                self.takes_arguments.add(mentioned)
        is_judged = key not in self.meanings and key not in PYTHON and today(key) not in _HELPERS
        if self.judge and is_judged and not self._is_of_script(mentioned):
            self.judge.mention(mentioned)
        if max(len(module), len(name)) > _LONGEST_NAME:
            raise ExcessiveError(f"names a class by {max(len(module), len(name))} characters")
        if mentioned not in self.known and key not in self.meanings and f"{module}.{name}" in self.paths:
            # Python resolves dots in the name as attributes. torch compares the joined path, wherever the module ends.
            self.odd(f"names {brief(mentioned)} with its module and its name divided elsewhere")
        self.charge(1 + (len(module) + len(name)) // _BYTES_EACH)
        self.globals[key] = mentioned
        return mentioned

    def _is_of_script(self, name: Any) -> bool:
        """Whether a class is one of the program that comes with the pickle."""
        return type(name) is Global and self.enums is not None and name.module.partition(".")[0] == self.enums

    def constructor(self, name: tuple[str, str]) -> Constructor | None:
        """Return what makes the value of a call of `name`: what the vocabulary has, else what Python's types have."""
        construct = self.vocabulary.constructors.get(name)
        return PYTHON[name](self.made) if construct is None and name in PYTHON else construct

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
                    self.odd(f"makes a {brief(function)} with arguments, and without calling it")
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
            self.suspects.update(dict.fromkeys(attacks.ways_out(function, args)))
        elif type(function) is Opaque:
            inner: Any = function
            for _ in range(CALL_DEPTH):
                if type(inner) is not Opaque:
                    break
                inner = inner.cls
            else:
                raise ExcessiveError(f"calls the result of a call, more than {CALL_DEPTH} times over")
        else:
            raise MalformedError(f"calls a value of type {type(function).__name__}")
        if judge and not self._is_of_script(function):
            judge.call(function, args, how, kwargs)
        coded = attacks.code_called(function, args)
        if coded is not None:
            self.suspects[coded] = None
        made = Opaque(function, args, kwargs, how)
        if type(function) is Global and function in self.unfinished:
            self._note_place(made)
        return made

    def _note_place(self, made: Opaque) -> None:
        """Remember the memo index that `made` will get: picklers store what they make at once."""
        self.places[id(made)] = len(self.memo) + len(self.spill)

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

    def _forget(self) -> None:
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
                self._forget()
        elif self.spill.get(place) is old:
            self.spill[place] = new

    def _set_items(self, target: Any, items: list[Any]) -> None:
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

    def _append(self, target: Any, items: list[Any]) -> None:
        if self.judge:
            self.judge.append(target, items)
        if type(target) is list:
            target.extend(items)
        elif type(target) is deque:
            self.deques.extend(target, items)
        elif type(target) is Opaque:
            target.appended.extend(items)
        else:
            self.odd(f"appends to a value of type {type(target).__name__}")

    def _opaque_persistent(self, pid: Any) -> Any:
        if self.judge:
            self.judge.call(_PERSISTENT, (pid,), "reduce", None)
        return Opaque(_PERSISTENT, pid, None, "persistent")


def _as_newobj(name: str, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any] | None] | None:
    """Return class, arguments and keywords of an object made through a helper of `copyreg` (protocols 0 and 1), or
    None."""
    if name == "_reconstructor" and len(args) == 3 and args[1] in _OBJECTS and args[2] is None:
        made, given, kwargs = args[0], (), None
    elif name == "__newobj__" and args:
        made, given, kwargs = args[0], args[1:], None
    elif name == "__newobj_ex__" and len(args) == 3 and type(args[1]) is tuple and _is_kwargs(args[2]):
        made, given, kwargs = args
    else:
        return None
    return (made, given, kwargs) if type(made) is Global and made.module not in ("copyreg", "copy_reg") else None


def _is_kwargs(value: Any) -> bool:
    return type(value) is dict and all(type(name) is str for name in value)


# ----------------------------------------------------------------------------------------------------- rare opcodes


def _push(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    """Return an opcode that pushes what `make` reads."""

    def act(machine: _Machine) -> None:
        value = make(machine)  # may replace the stack
        machine.stack.append(value)

    return act


def _proto(machine: _Machine) -> None:
    version = machine.take(1)[0]
    if version > 5:
        raise RefusedError(f"is of protocol {version}; 0 to 5 are known")


def _frame(machine: _Machine) -> None:
    machine.enter_frame(machine.number(_u64, 8))


def _end_of_frame(machine: _Machine) -> None:
    if machine.pos <= machine.size:
        raise MalformedError("has an unknown opcode 0x00")
    machine.leave_frame()


def _global(machine: _Machine) -> Any:
    module = machine.line()
    return machine.find(str(module, "utf-8"), str(machine.line(), "utf-8"))


def _instantiate(machine: _Machine, made: Any, args: list[Any]) -> Any:
    """Return what INST and OBJ make: a call, or without arguments a new object of the class `made`."""
    return machine.call(made, tuple(args), "reduce" if args else "newobj")


def _stack_global(machine: _Machine) -> None:
    name = machine.stack.pop()
    machine.stack[-1] = machine.find(machine.stack[-1], name)


def _inst(machine: _Machine) -> None:
    made = _global(machine)
    args = machine.above_mark()
    machine.stack.append(_instantiate(machine, made, args))


def _obj(machine: _Machine) -> None:
    made, *args = machine.above_mark() or [None]
    machine.stack.append(_instantiate(machine, made, args))


def _newobj_ex(machine: _Machine) -> None:
    kwargs = machine.stack.pop()
    args = machine.stack.pop()
    if not _is_kwargs(kwargs):
        raise MalformedError("makes an object with keywords that are not a dictionary")
    machine.stack[-1] = machine.call(machine.stack[-1], args, "newobj_ex", kwargs)


def _pop(machine: _Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.above_mark()


def _stored(machine: _Machine) -> list[Any]:
    """Return the values above the mark, which go into a container."""
    items = machine.above_mark()
    if machine.judge:
        machine.judge.put(items)
    return items


def _dict(machine: _Machine) -> None:
    items = machine.above_mark()
    made: dict[Any, Any] = {}
    machine._set_items(made, items)
    machine.stack.append(made)


def _empty_set(machine: _Machine) -> None:
    machine.charge(SET_COST)
    machine.stack.append(set())


def _add_items(machine: _Machine) -> None:
    items = machine.above_mark()
    target = machine.stack[-1]
    if machine.judge:
        machine.judge.append(target, items)
    if type(target) is set:
        machine.keys.update(target, items)
    elif type(target) is Opaque:
        target.appended.extend(items)
    else:
        raise MalformedError(f"adds elements to a value of type {type(target).__name__}")


def _checked(machine: _Machine, length: int) -> int:
    if length > machine.limits.int_bytes:
        raise ExcessiveError(f"has an integer of {length} bytes")
    return length


def _long(machine: _Machine, length: int) -> int:
    return int.from_bytes(machine.take(_checked(machine, length)), "little", signed=True)


def _digits(machine: _Machine, line: bytes) -> int:
    # A byte holds 2.4 digits.
    if len(line) > min(machine.limits.int_bytes * 12 // 5, _MAX_DIGITS):
        raise ExcessiveError(f"has an integer of {len(line)} digits")
    if _WHOLE.fullmatch(line):
        return int(line)
    machine.odd(f"has {brief(line)[1:]} where a number should be")
    try:
        return int(line)
    except ValueError:
        return 0


def _int(machine: _Machine) -> Any:
    line = machine.line()
    return {b"00": False, b"01": True}[line] if line in (b"00", b"01") else _digits(machine, line)


def _text_float(machine: _Machine) -> float:
    line = machine.line()
    value = float(line) if _REAL.fullmatch(line) or line in _SPECIAL else None
    # For a number that is too large, one of CPython's unpicklers makes infinity; the other refuses it.
    if value is None or (math.isinf(value) and line not in _SPECIAL):
        machine.odd(f"has {brief(line)[1:]} where a number should be")
        return 0.0
    return value


def _text_index(machine: _Machine) -> int:
    index = _digits(machine, machine.line())
    if index < 0:
        raise MalformedError("has a negative index")
    return index


def _python2(data: bytes) -> Any:
    """Return a Python 2 string, which may be text or bytes: str if it is UTF-8, as torch.load assumes, else bytes."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


def _string(machine: _Machine) -> Any:
    line = machine.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise MalformedError("has a string without quotes")
    if any(found[1] for found in _ESCAPES.finditer(line[1:-1])):
        # Python only warns, and reads something else.
        machine.odd("has a string with an invalid escape")
        return ""
    return _python2(codecs.escape_decode(line[1:-1])[0])


def _unicode(machine: _Machine) -> str:
    return str(machine.line(), "raw-unicode-escape")


def _persid(machine: _Machine) -> Any:
    return machine.persistent(str(machine.line(), "ascii"))


def _refuse(reason: str) -> Callable[[_Machine], None]:
    def act(machine: _Machine) -> None:
        raise RefusedError(reason)

    return act


_EXTENSION = _refuse("names a class by a number of the extension registry of the Python that wrote it")
_BUFFER = _refuse("needs a buffer that was kept outside it")

_RARE: dict[int, Callable[[_Machine], None]] = {
    0x80: _proto,
    0x95: _frame,
    _END_OF_FRAME[0]: _end_of_frame,
    # names and objects
    ord("c"): _push(_global),
    0x93: _stack_global,
    ord("i"): _inst,
    ord("o"): _obj,
    0x92: _newobj_ex,
    ord("P"): _push(_persid),
    0x82: _EXTENSION,
    0x83: _EXTENSION,
    0x84: _EXTENSION,
    # containers
    ord("l"): _push(_stored),
    ord("d"): _dict,
    0x8F: _empty_set,
    0x90: _add_items,
    0x91: _push(lambda m: frozenset(m.keys.set_of(_stored(m)))),
    # numbers
    ord("I"): _push(_int),
    ord("L"): _push(lambda m: _digits(m, m.line().removesuffix(b"L"))),
    0x8A: _push(lambda m: _long(m, m.take(1)[0])),
    0x8B: _push(lambda m: _long(m, m.number(_i32, 4))),
    ord("F"): _push(_text_float),
    # text and bytes
    ord("V"): _push(_unicode),
    0x8D: _push(lambda m: str(m.take(m.number(_u64, 8)), "utf-8", "surrogatepass")),
    ord("S"): _push(_string),
    ord("T"): _push(lambda m: _python2(m.take(m.number(_i32, 4)))),
    ord("U"): _push(lambda m: _python2(m.take(m.take(1)[0]))),
    ord("B"): _push(lambda m: m.take(m.number(_u32, 4))),
    ord("C"): _push(lambda m: m.take(m.take(1)[0])),
    0x8E: _push(lambda m: m.take(m.number(_u64, 8))),
    0x96: _push(lambda m: bytearray(m.take(m.number(_u64, 8)))),
    0x97: _BUFFER,
    0x98: _BUFFER,
    # stack and memo
    ord("0"): _pop,
    ord("1"): lambda m: m.above_mark().clear(),
    ord("2"): _push(lambda m: m.stack[-1]),
    ord("g"): _push(lambda m: m.get(_text_index(m))),
    ord("p"): lambda m: m._put(_text_index(m), m.stack[-1]),
}
