"""The inert pickle machine: it reads a pickle into a plain tree and runs nothing.

A pickle is a program for a small stack machine. Some opcodes name a class or function, and others call it: that is how
Python, when it loads a pickle, runs any code that the author wanted. Here a name stays a name. The machine looks it up,
by exact match, in tables of names that are understood as data (`Vocabulary`). A call of any other name becomes an
`Opaque` node that records the call. The machine imports nothing, and calls nothing that a pickle names.

The machine understands all opcodes of protocols 0 to 5, as documented in CPython's `Lib/pickletools.py`. It refuses
out-of-band buffers (protocol 5) and the extension registry, because they need things that a file does not hold. It also
refuses opcodes that CPython's C unpickler, its Python unpickler and torch's for `weights_only` read differently:
numbers that no pickler writes so, arguments beyond their frame, and calls with arguments that no pickler passes.

Time and memory are proportional to the length of the pickle: every length and index in it is checked before use, and
nothing recurses.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any, NamedTuple

from ckptconv.errors import CkptconvError, CorruptError, LimitError, TruncatedError, UnsupportedError
from ckptconv.pickles import watching
from ckptconv.pickles.limits import check_nesting
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.opcodes import HOLE, RARE, NotStoredError, State
from ckptconv.pickles.refusing import refuse_attack
from ckptconv.pickles.vocabulary import (
    DEFAULT_LIMITS,
    PLAIN,
    ExcessiveError,
    Limits,
    MalformedError,
    RefusedError,
    Vocabulary,
)
from ckptconv.process import no_garbage


class Loaded(NamedTuple):
    """A pickle as it was read: its `value`; the position `end` after it; every class and function that it mentions, in
    order of first mention; and those of them that it calls and that were kept as `Opaque`."""

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
    `limits`, and UnsupportedError if it needs objects of a running Python. If attacks are refused
    (`refusing_attacks`), raises UnsafeError for one, broken or not: some attacks run before the pickle breaks.
    """
    data = bytes(data)
    with no_garbage():
        try:
            return run(Machine(data, vocabulary, where, start, limits, lean=True))
        except NotStoredError:
            return run(Machine(data, vocabulary, where, start, limits, lean=False))


def run(machine: Machine) -> Loaded:
    try:
        loaded = machine.run()
    except CkptconvError as error:
        machine.report(broken=True)
        if machine.suspects or machine.around:  # in a broken frame, an attack may follow
            refuse_attack("refuse_pickle", machine, error)
        if isinstance(error, TruncatedError):
            raise
        raise machine.oddity or error from None
    else:
        machine.report(loaded.value)
        if machine.suspects:
            refuse_attack("refuse_pickle", machine)
        return loaded
    finally:
        # The machine is in reference cycles, so it and the data would stay until the next garbage collection.
        vars(machine).clear()


# --------------------------------------------------------------------------------------------------------- machine

# Values that are hardly ever referred to again, by the opcodes that follow. A tuple before REDUCE and BINPERSID is the
# arguments of a call, or a persistent id; before numbers, bools and tuples it is the size or stride of a tensor.
_ONCE: dict[type, frozenset[int]] = {tuple: frozenset(b"RQKMJ()\x88\x89"), OrderedDict: frozenset(b"t")}

_u16 = struct.Struct("<H").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u32 = struct.Struct("<I").unpack_from
_f64 = struct.Struct(">d").unpack_from


class Machine(State):
    """One run over one pickle.

    A lean run does not keep values in the memo that Python's pickler always stores there and hardly ever fetches: the
    tuples that describe a tensor, and the empty OrderedDict of its hooks. In a file of a million tensors, these are
    most of the memory. If a pickle does refer to one, `load` reads it again with a full memo.
    """

    # ---- running

    def run(self) -> Loaded:
        """Read the pickle. Turn every fault in it into an error that gives the position."""
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
        except NotStoredError:
            if self.lean:
                raise
            raise self.error(CorruptError, "refers to an object that it did not store") from None
        except ExcessiveError as reason:
            raise self.error(LimitError, str(reason)) from None
        except RefusedError as reason:
            raise self.error(UnsupportedError, str(reason)) from None
        except MalformedError as reason:
            raise self.error(CorruptError, str(reason)) from None
        except (IndexError, struct.error) as error:
            # A struct.error always means missing data. An IndexError means that too, or too short a stack.
            if not (isinstance(error, struct.error) or self.short or self.pos >= len(self.data)):
                raise self.error(CorruptError, "reads from an empty stack") from None
            if self.around:
                raise self.error(CorruptError, "has an instruction that extends beyond the end of its frame") from None
            size = len(self.data) - self.start
            raise self.error(TruncatedError, f"ends after {size} bytes, incomplete") from None
        return Loaded(value, end, tuple(self.globals.values()), tuple(self.opaque))

    def report(self, value: Any = None, *, broken: bool = False) -> None:
        """Pass the reading so far to the watcher, if there is one."""

        def reading() -> watching.PickleReading:
            names = tuple(self.opaque), tuple(self.suspects)
            judge = self.judge
            unknown = (tuple(judge.unknown), tuple(judge.unknown_calls)) if judge else ((), ())
            return watching.PickleReading(self.where, *names, *unknown, broken, value)

        watching.report(reading)

    def _loop(self) -> Any:
        """Run the opcodes and return the value.

        A chain of comparisons is most of the work, so ranges divide the opcodes first, and of each range the most
        frequent come first. Those that are rare in checkpoints are in `RARE`.
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
                            self.put(len(memo) + len(spill), value)
                        else:
                            memo.append(value)
                        continue
                    if op >= 0x8A:
                        if op == 0x8C:  # SHORT_BINUNICODE
                            end = pos + 1 + data[pos]
                            if end > size:
                                raise self.short_of()
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
                            raise NotStoredError
                        stack.append(value)
                        continue
                    if op == 0x6A:  # LONG_BINGET
                        index = u32(data, pos)[0]
                        value = memo[index] if index < len(memo) else self.get(index)
                        if value is HOLE:
                            raise NotStoredError
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
                            self.put(index, value)
                        continue
                    if op == 0x75:  # SETITEMS
                        items_list = stack
                        stack = marks.pop()
                        self.pos = pos
                        self.set_items(stack[-1], items_list)
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
                            self.set_items(target, [key, value])
                        continue
                    if op == 0x65:  # APPENDS
                        items_list = stack
                        stack = marks.pop()
                        self.pos = pos
                        self.append(stack[-1], items_list)
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
                        raise self.short_of()
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
                    self.append(stack[-1], [value])
                    continue
                elif op == 0x4E:  # NONE
                    stack.append(None)
                    continue
                elif op == 0x5D:  # EMPTY_LIST
                    self.charge(1)
                    stack.append([])
                    continue
                act = RARE.get(op)
                if act is None:
                    raise MalformedError(f"has an unknown opcode 0x{op:02x}")
                self.pos, self.stack = pos, stack
                act(self)
                data, pos, size, stack = self.data, self.pos, self.size, self.stack
        except UnicodeDecodeError:
            raise MalformedError("has text that is not UTF-8") from None
        finally:
            self.pos, self.stack = pos, stack
