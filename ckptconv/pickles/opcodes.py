"""The state of a run over a pickle, and a table of the opcodes that are rare in checkpoints.

The frequent ones are in the machine's loop, which needs no calls for them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.pickles.calls import Calls, is_kwargs
from ckptconv.pickles.containers import SET_COST
from ckptconv.pickles.nodes import Opaque
from ckptconv.pickles.vocabulary import ExcessiveError, Limits, MalformedError, RefusedError, Vocabulary

# Memo entry for a value that a lean run does not keep.
HOLE: Any = object()
# Not a pickle opcode: the machine appends it to the bytes of a frame.
END_OF_FRAME = b"\0"
_i32 = struct.Struct("<i").unpack_from
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


class NotStoredError(Exception):
    """The pickle refers to a memo entry that a lean run did not keep, or that does not exist."""


class State(Calls):
    """The position of a run in the bytes of a pickle, its stack, and its memo. `where` names the pickle in errors."""

    def __init__(
        self, data: bytes, vocabulary: Vocabulary, where: str, start: int, limits: Limits, *, lean: bool
    ) -> None:
        super().__init__(vocabulary, limits, len(data) - start)
        # `data` are the bytes that are read now: the whole pickle, or one frame. In a frame, `around` is the data and
        # the position to continue with after it, and `base` is the position of the frame in that data.
        self.data, self.size = data, len(data)
        self.pos = self.start = start
        self.base = 0
        self.around: tuple[bytes, int, int] | None = None
        self.short = False
        self.where = where
        self.lean = lean
        # Stacks below the marks; MARK starts a new stack.
        self.marks: list[list[Any]] = []

    def odd(self, reason: str) -> None:
        """Record `reason` to refuse the pickle for at its end, and read on."""
        if self.oddity is None:
            self.oddity = CorruptError(str(self.error(CorruptError, reason)))

    def error(self, kind: type[CorruptError] | type[UnsupportedError], reason: str) -> CorruptError | UnsupportedError:
        return kind(f"{self.where}: the pickle {reason} (at byte {self.base + min(self.pos, self.size)}).")

    def short_of(self) -> Exception:
        """Return the error for a length that goes beyond the data."""
        self.short = True
        return IndexError()

    def enter_frame(self, length: int) -> None:
        """Read the next `length` bytes on their own: no instruction in them may go beyond."""
        if self.around and self.pos < self.size:
            # One of CPython's unpicklers refuses this, and the other reads on.
            self.odd("has a frame in a frame")
            whole, _, base = self.around
            self._read(whole, self.base + self.pos - base, base)
        elif self.around:
            self.leave_frame()
        end = self.pos + length
        if end > self.size:
            raise self.short_of()
        around = self.data, end, self.base
        self._read(self.data[self.pos : end] + END_OF_FRAME, 0, self.base + self.pos)
        self.size, self.around = length, around

    def leave_frame(self) -> None:
        assert self.around
        self._read(*self.around)

    def _read(self, data: bytes, pos: int, base: int = 0) -> None:
        """Continue at `pos` of `data`, which begins at `base` of the whole pickle."""
        self.data, self.size, self.pos, self.base, self.around = data, len(data), pos, base, None

    def skip_embedded(self, target: Opaque) -> None:
        """Continue after the bytes that `target` stands for, if any. They follow the frame that it is in."""
        assert self.vocabulary.embedded
        skipped = self.vocabulary.embedded(target, self.base + (self.size if self.around else self.pos))
        if skipped is not None:
            if self.around and self.pos < self.size:
                self.odd("has bytes after a frame, but continues in the frame")
            position, data = skipped
            self._read(data, 0, position)

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes of the pickle."""
        part = self.data[self.pos : self.pos + length]
        if length < 0:
            raise MalformedError("has a negative length")
        if len(part) != length:
            raise self.short_of()
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
            raise self.short_of()
        line = self.data[self.pos : end]
        self.pos = end + 1
        return line

    def above_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def put(self, index: int, value: Any) -> None:
        memo, spill = self.memo, self.spill
        if index < len(memo):
            memo[index] = value
            self.forget_phrases()
        elif index > len(memo):
            spill[index] = value
        else:
            memo.append(value)
            while len(memo) in spill:
                memo.append(spill.pop(len(memo)))

    def get(self, index: int) -> Any:
        value = self.memo[index] if 0 <= index < len(self.memo) else self.spill.get(index, HOLE)
        if value is HOLE:
            raise NotStoredError
        return value


def _push(make: Callable[[State], Any]) -> Callable[[State], None]:
    """Return an opcode that pushes the value that `make` reads."""

    def act(machine: State) -> None:
        value = make(machine)  # may replace the stack
        machine.stack.append(value)

    return act


def _proto(machine: State) -> None:
    version = machine.take(1)[0]
    if version > 5:
        raise RefusedError(f"is of protocol {version}; protocols 0 to 5 are supported")


def _frame(machine: State) -> None:
    machine.enter_frame(machine.number(_u64, 8))


def _end_of_frame(machine: State) -> None:
    if machine.pos <= machine.size:
        raise MalformedError("has an unknown opcode 0x00")
    machine.leave_frame()


def _global(machine: State) -> Any:
    module = machine.line()
    return machine.find(str(module, "utf-8"), str(machine.line(), "utf-8"))


def _instantiate(machine: State, cls: Any, args: list[Any]) -> Any:
    """Return the value of INST or OBJ: a call, or without arguments a new object of the class `cls`."""
    return machine.call(cls, tuple(args), "reduce" if args else "newobj")


def _stack_global(machine: State) -> None:
    name = machine.stack.pop()
    machine.stack[-1] = machine.find(machine.stack[-1], name)


def _inst(machine: State) -> None:
    cls = _global(machine)
    args = machine.above_mark()
    machine.stack.append(_instantiate(machine, cls, args))


def _obj(machine: State) -> None:
    cls, *args = machine.above_mark() or [None]
    machine.stack.append(_instantiate(machine, cls, args))


def _newobj_ex(machine: State) -> None:
    kwargs = machine.stack.pop()
    args = machine.stack.pop()
    if not is_kwargs(kwargs):
        raise MalformedError("creates an object with keywords that are not a dictionary")
    machine.stack[-1] = machine.call(machine.stack[-1], args, "newobj_ex", kwargs)


def _pop(machine: State) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.above_mark()


def _stored(machine: State) -> list[Any]:
    """Return the values above the mark, which go into a container."""
    items = machine.above_mark()
    if machine.judge:
        machine.judge.put(items)
    return items


def _dict(machine: State) -> None:
    items = machine.above_mark()
    mapping: dict[Any, Any] = {}
    machine.set_items(mapping, items)
    machine.stack.append(mapping)


def _empty_set(machine: State) -> None:
    machine.charge(SET_COST)
    machine.stack.append(set())


def _add_items(machine: State) -> None:
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


def _checked(machine: State, length: int) -> int:
    if length > machine.limits.int_bytes:
        raise ExcessiveError(f"has an integer of {length} bytes; at most {machine.limits.int_bytes} are supported")
    return length


def _long(machine: State, length: int) -> int:
    return int.from_bytes(machine.take(_checked(machine, length)), "little", signed=True)


def _line_as(kind: str) -> Callable[[State], Any]:
    """Return the function that reads the next line as a value of this kind, which only protocol 0 writes as text."""

    def read(machine: State) -> Any:
        from ckptconv.pickles import text_values

        return getattr(text_values, kind)(machine.line(), machine)

    return read


def python2(data: bytes) -> Any:
    """Return a Python 2 string, which may be text or bytes: str if it is UTF-8, as torch.load assumes, else bytes."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


def _unicode(machine: State) -> str:
    return str(machine.line(), "raw-unicode-escape")


def _persid(machine: State) -> Any:
    return machine.persistent(str(machine.line(), "ascii"))


def _refuse(reason: str) -> Callable[[State], None]:
    def act(machine: State) -> None:
        raise RefusedError(reason)

    return act


_EXTENSION = _refuse("refers to a class by a number in the extension registry of the Python that wrote it")
_index, _quoted = _line_as("index"), _line_as("quoted")
_BUFFER = _refuse("needs a buffer from outside the pickle")

RARE: dict[int, Callable[[State], None]] = {
    0x80: _proto,
    0x95: _frame,
    END_OF_FRAME[0]: _end_of_frame,
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
    ord("I"): _push(_line_as("integer")),
    ord("L"): _push(_line_as("long")),
    0x8A: _push(lambda m: _long(m, m.take(1)[0])),
    0x8B: _push(lambda m: _long(m, m.number(_i32, 4))),
    ord("F"): _push(_line_as("real")),
    # text and bytes
    ord("V"): _push(_unicode),
    0x8D: _push(lambda m: str(m.take(m.number(_u64, 8)), "utf-8", "surrogatepass")),
    ord("S"): _push(lambda m: python2(_quoted(m))),
    ord("T"): _push(lambda m: python2(m.take(m.number(_i32, 4)))),
    ord("U"): _push(lambda m: python2(m.take(m.take(1)[0]))),
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
    ord("g"): _push(lambda m: m.get(_index(m))),
    ord("p"): lambda m: m.put(_index(m), m.stack[-1]),
}
