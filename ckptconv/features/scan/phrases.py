"""Read the opcodes of one tensor, as torch.save writes them, with one regular expression instead of 25 steps.

A token stands for the tensor, as for every object, so only the names that the phrase fetches decide. The entries added
to the memo are those of the machine, but for values that are not kept. A phrase that does not match exactly is left to
the machine.
"""

from __future__ import annotations

import functools
import itertools
import re
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.pickles.opcodes import HOLE

# The calls of torch's pickler for a tensor, and for its hooks; and a tensor.
_TENSOR = Global("torch._utils", "_rebuild_tensor_v2"), Global("collections", "OrderedDict")
_A_TENSOR = Opaque(_TENSOR[0])
_LENGTH = struct.Struct("<I")
# BINGET and LONG_BINGET; BININT1, BININT2 and BININT.
_GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....)"
_INTS = rb"(\)|%(i)b\x85|%(i)b%(i)b\x86|%(i)b%(i)b%(i)b\x87|\((?:%(i)b){0,64}t)" % {b"i": _INT}
_GETS = re.compile(rb"h(.)|j(....)", re.DOTALL)
# By length in bytes, as little-endian integers: consecutive LONG_BINPUTs from memo index 0 on, and the number to add to
# them for each index that the first one is higher.
_FIRST_PUTS = {5 * n: sum((0x72 | at << 8) << 40 * at for at in range(n)) for n in range(10)}
_NEXT_PUTS = {5 * n: sum(1 << 40 * at + 8 for at in range(n)) for n in range(10)}
# Entries of a memo that opcodes with an index of one byte store.
_SHORT = 256
# By length in bytes of their LONG_BINPUTs: the holes for values that are not kept.
_HOLES = {5 * n: [HOLE] * n for n in range(6)}
_KINDS_KEPT = 4096
# Tensors that are made together, at most.
_AT_ONCE = 1024

# The opcodes that tensors of one kind have in common: the function; the storage but for its key, of which it has the
# length, its location and its number of elements; the tensor's size, stride and flag; and its hooks. Then,
# whether the name, the location, the size, the stride and the hooks are stored in the memo.
_Spelled: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, int, int, int, int, int]
# The groups of `phrase_of` that store in the memo, and that of the storage's key.
_PUTS, _KEY, _LOCATION_PUT = (1, 6, 9, 11, 14, 16, 19, 20, 21), 5, 9


# The opcodes of one tensor, as torch.save writes them once the memo has 256 entries. They begin after the function that
# makes the tensor. For an entry of a dict, they begin after the key: first comes its LONG_BINPUT, unless the key was in
# the memo before, then the function. So is the key of a storage that several tensors share.
@functools.cache  # a short pickle has none, and compiling this takes as long as reading it
def phrase_of() -> re.Pattern[bytes]:
    return re.compile(
        rb"(?:(r....)?(%(get)b))?\(\((%(get)b%(get)b)(?:X(.)\0\0\0([0-9]{1,20})(r....)|(%(get)b))"
        rb"(%(get)b|X.\0\0\0[a-z]{1,16}(?::[0-9]{1,4})?)(r....)?(%(int)b)t(r....)Q"
        rb"(%(int)b)%(ints)b(r....)?%(ints)b(r....)?([\x88\x89])(%(get)b)\)R(r....)t(r....)R(r....)"
        % {b"get": _GET, b"int": _INT, b"ints": _INTS},
        re.DOTALL,
    )


def _in_order(puts: bytes, first: int) -> bool:
    """Return whether the LONG_BINPUTs in `puts` store at consecutive memo indices from `first` on."""
    return int.from_bytes(puts, "little") == _FIRST_PUTS[len(puts)] + first * _NEXT_PUTS[len(puts)]


def _recalled(gets: bytes, memo: list[Any]) -> list[Any]:
    """Return the values that BINGET and LONG_BINGET opcodes push; HOLE for an index beyond the memo."""
    places = (int.from_bytes(short or long, "little") for short, long in _GETS.findall(gets))
    return [memo[place] if place < len(memo) else HOLE for place in places]


def _fetched(get: bytes, memo: list[Any]) -> Any:
    """Return the value that one BINGET or LONG_BINGET pushes; HOLE for an index beyond the memo."""
    place = int.from_bytes(get[1:], "little")
    return memo[place] if place < len(memo) else HOLE


def _text_of(data: bytes) -> Any:
    """Return a string as pickles spell it; HOLE if it is none."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return HOLE


def _name(data: bytes, pos: int, memo: list[Any]) -> tuple[Any, int]:
    """Return the string that is spelled out or fetched from the memo at `pos`, or HOLE; and the position after it."""
    opcode = data[pos : pos + 1]
    if opcode == b"X":
        end = pos + 5 + int.from_bytes(data[pos + 1 : pos + 5], "little")
        return _text_of(data[pos + 5 : end]), end
    if opcode not in (b"h", b"j"):
        return HOLE, pos
    end = pos + (2 if opcode == b"h" else 5)
    return (*_recalled(data[pos:end], memo), HOLE)[0], end


class _Kind:
    """A kind of tensors: the function that the pickle calls for them, and the location of their storage; and the form
    of their entries in a dict, once one was read."""

    __slots__ = ("entry", "function", "location")

    def __init__(self, function: Any, location: Any) -> None:
        self.function, self.location = function, location
        self.entry: _Entry | None = None


class _Entry:
    """The opcodes of an entry of a dict, after its key. Those of two tensors of a kind differ only in the digits of
    their storages' keys, and in the memo indices, which are consecutive.

    So the opcodes, as one little-endian number, are the sum of `fixed`, the digits, and `step` times the first index.
    """

    def __init__(self, match: re.Match[bytes], location: Any) -> None:
        text, begin = match.group(), match.start()
        puts = [match.start(group) + 1 - begin for group in _PUTS if match.group(group)]
        self.size = len(text)
        self.start, self.stop = match.start(_KEY) - begin, match.end(_KEY) - begin
        self.step = sum(1 << 8 * at for at in puts)
        first = int.from_bytes(text[puts[0] : puts[0] + 4], "little")
        digits = int.from_bytes(match.group(_KEY), "little") << 8 * self.start
        self.fixed = int.from_bytes(text, "little") - digits - first * self.step
        # The memo entries after the name and the key, and before the tensor.
        known = [location] if match.group(_LOCATION_PUT) else []
        self.between = known + [HOLE] * (len(puts) - len(known) - 3)


class TensorPhrases:
    """Reads the phrases of one pickle. `persistent` is called with a persistent id for all tensors of a kind, which may
    differ in its number of elements and, as numbers in text, in its key."""

    opening = b"(("

    def __init__(self, persistent: Callable[[Any], Any]) -> None:
        self._persistent = persistent
        self._kinds: dict[_Spelled, _Kind | None] = {}
        # The kind that came after two others: layers of a model are alike.
        self._after: dict[tuple[_Kind | None, _Kind | None], _Kind] = {}

    def forget(self) -> None:
        """Clear the cache: a memo entry was replaced, so opcodes that fetch it may mean something else."""
        self._kinds.clear()
        self._after.clear()

    def read(self, data: bytes, pos: int, stack: list[Any], memo: list[Any]) -> tuple[int, int]:
        """Make the tensor of the phrase at `pos`, whose function is on top of `stack`, and those of the phrases that
        follow it as values of a dict, each after its key. See `vocabulary.Phrases`."""
        count = 0
        before: _Kind | None = None
        last: _Kind | None = None
        while True:
            kind = self._after.get((before, last), last)
            more, end = self._alike(kind.entry, data, pos, stack, memo) if kind and kind.entry else (0, pos)
            if not more:
                kind, end = self._phrase(data, pos, stack, memo, count == 0)
                if kind is None:
                    # For each tensor itself, and its hooks.
                    return pos, 2 * count
                if last is not None:
                    self._after[before, last] = kind
                more = 1
            before, last = last if more == 1 else kind, kind
            count, pos = count + more, end

    def _alike(self, entry: _Entry, data: bytes, pos: int, stack: list[Any], memo: list[Any]) -> tuple[int, int]:
        """Make the tensors of the entries of a dict from `pos` on, keys and values, that are like `entry`. Return their
        number, and the position after them."""
        number, length_at = int.from_bytes, _LENGTH.unpack_from
        size, start, stop, shift = entry.size, entry.start, entry.stop, 8 * entry.start
        expected, step = entry.fixed + len(memo) * entry.step, (len(entry.between) + 3) * entry.step
        last = len(data) - 4
        names: list[Any] = []
        keys: list[str] = []
        while pos < last and data[pos] == 0x58 and len(keys) < _AT_ONCE:
            at = pos + 5 + length_at(data, pos + 1)[0]
            text = data[at : at + size]
            digits = text[start:stop]
            # An entry that is cut short would equal one that ends in zeros.
            if number(text, "little") != expected + (number(digits, "little") << shift) or len(text) != size:
                break
            if not digits.isdigit():
                break
            try:
                name: Any = data[pos + 5 : at].decode()
            except UnicodeDecodeError:
                name = _text_of(data[pos + 5 : at])
                if name is HOLE:
                    break
            names.append(name)
            keys.append(digits.decode())
            expected += step
            pos = at + size
        tensors = itertools.repeat(_A_TENSOR)
        stack += itertools.chain.from_iterable(zip(names, tensors, strict=False))
        between = map(itertools.repeat, entry.between)
        memo += [*itertools.chain.from_iterable(zip(names, keys, *between, tensors, strict=False))]
        return len(keys), pos

    def _phrase(
        self, data: bytes, pos: int, stack: list[Any], memo: list[Any], first: bool
    ) -> tuple[_Kind | None, int]:
        """Make the tensor of the phrase at `pos`, after the key of a dict unless it is the `first`. Return its kind, or
        None, and the position after it."""
        name, at = (None, pos) if first else _name(data, pos, memo)
        match = None if name is HOLE or len(memo) < _SHORT else phrase_of().match(data, at)
        if not match:
            return None, pos
        (
            put, function, head, length, key_text, key_put, key_get, location, location_put, numel, id_put, _,
            size, size_put, stride, stride_put, flag, hooks, hooks_put, args_put, last_put,
        ) = match.groups(b"")  # fmt: skip
        # A dict entry has its function, and a key that is either spelled out and stored, or fetched from the memo.
        if not first and (not function or bool(put) != (data[pos] == 0x58)):
            return None, pos
        spelled = (
            *(function, head, length, location, numel, size, stride, flag, hooks),
            *(len(put), len(location_put), len(size_put), len(stride_put), len(hooks_put)),
        )
        if spelled in self._kinds:
            kind = self._kinds[spelled]
        else:
            if len(self._kinds) == _KINDS_KEPT:
                self.forget()
            kind = self._kinds[spelled] = self._kind(spelled, stack[-1], memo)
        key = _fetched(key_get, memo) if key_get else str(key_text, "ascii")
        if kind is None or type(key) is not str or (first and kind.function is not stack[-1]):
            return None, pos
        if not (key.isascii() and key.isdecimal()) or (key_put and len(key) != length[0]):
            return None, pos
        lost = id_put + size_put + stride_put + hooks_put + args_put
        puts = put + key_put + location_put + lost + last_put
        if not _in_order(puts, len(memo)):
            return None, pos
        if first:
            stack[-1] = _A_TENSOR
        else:
            stack += name, _A_TENSOR
        if put:
            memo.append(name)
        if key_put:
            memo.append(key)
        if put and key_put:
            kind.entry = kind.entry or _Entry(match, kind.location)
        if location_put:
            memo.append(kind.location)
        # The persistent id, hooks, arguments, and a size or stride that is not empty are not kept.
        memo += _HOLES[len(lost)]
        memo.append(_A_TENSOR)
        return kind, match.end()

    def _kind(self, spelled: _Spelled, top: Any, memo: list[Any]) -> _Kind | None:
        """Return the kind of tensors that are spelled so; None if they are no tensors. `top` is the default
        function."""
        named, head, _, location, _, _, _, _, hooks, *_ = spelled
        function, tag, cls, made_of = *(_recalled(named, memo) or [top]), *_recalled(head + hooks, memo)
        if location.startswith(b"X"):
            where: Any = str(location[5:], "ascii") if location[1] == len(location) - 5 else HOLE
        else:
            where = _fetched(location, memo)
        if any(part is HOLE for part in (function, tag, cls, where, made_of)):
            return None
        if (function, made_of) != _TENSOR:
            return None
        self._persistent((tag, cls, "0", where, 0))
        return _Kind(function, where)
