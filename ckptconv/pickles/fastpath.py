"""Read what torch.save writes for one tensor with a single regular expression, instead of 25 opcodes one by one.

The tensor, and the entries added to the memo, equal what the machine makes of the opcodes in a lean run. A phrase that
does not match exactly is left to the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from ckptconv.pickles.vocabulary import Maker, Phrase

# Memo entry for a value that a lean run does not keep.
HOLE: Any = object()

_GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....)"
_INTS = rb"(\)|%(i)b\x85|%(i)b%(i)b\x86|%(i)b%(i)b%(i)b\x87|\((?:%(i)b){0,64}t)" % {b"i": _INT}
# The opcodes of one tensor, as torch.save writes them once the memo has 256 entries. They begin after the function that
# makes the tensor. For an entry of a dict, they begin after the key: first comes its LONG_BINPUT, unless the key was in
# the memo before, then the function. So is the key of a storage that several tensors share.
_PHRASE = re.compile(
    rb"(?:(r....)?(%(get)b))?\(\((%(get)b%(get)b)(?:X(.)\0\0\0([0-9]{1,20})(r....)|(%(get)b))"
    rb"(%(get)b|X.\0\0\0[a-z]{1,16}(?::[0-9]{1,4})?)(r....)?(%(int)b)t(r....)Q"
    rb"(%(int)b)%(ints)b(r....)?%(ints)b(r....)?([\x88\x89])(%(get)b)\)R(r....)t(r....)R(r....)"
    % {b"get": _GET, b"int": _INT, b"ints": _INTS},
    re.DOTALL,
).match
_PIECES = re.compile(rb"K(.)|M(..)|J(....)", re.DOTALL)
_GETS = re.compile(rb"h(.)|j(....)", re.DOTALL)
# By length in bytes, as little-endian integers: consecutive LONG_BINPUTs from memo index 0 on, and what to add to them
# for each index that the first one is higher.
_FIRST_PUTS = {5 * n: sum((0x72 | at << 8) << 40 * at for at in range(n)) for n in range(10)}
_NEXT_PUTS = {5 * n: sum(1 << 40 * at + 8 for at in range(n)) for n in range(10)}
# By length in bytes of their LONG_BINPUTs: the holes for values that a lean run does not keep.
_HOLES = {5 * n: [HOLE] * n for n in range(6)}
_KINDS_KEPT = 4096

# The opcodes that tensors of one kind have in common: the function; the storage but for its key, its location and its
# number of elements; the tensor's offset, size, stride and flag; and its hooks.
_Spelled: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]


def _in_order(puts: bytes, first: int) -> bool:
    """Whether the LONG_BINPUTs in `puts` store at consecutive memo indices from `first` on."""
    return int.from_bytes(puts, "little") == _FIRST_PUTS[len(puts)] + first * _NEXT_PUTS[len(puts)]


def _ints(opcodes: bytes) -> tuple[int, ...]:
    """Return the integers that BININT1, BININT2 and BININT opcodes push."""
    found = _PIECES.findall(opcodes)
    return tuple(int.from_bytes(a or b or c, "little", signed=bool(c)) for a, b, c in found)


def _recalled(gets: bytes, memo: list[Any]) -> list[Any]:
    """Return the values that BINGET and LONG_BINGET opcodes push; HOLE for an index beyond the memo."""
    places = (int.from_bytes(short or long, "little") for short, long in _GETS.findall(gets))
    return [memo[place] if place < len(memo) else HOLE for place in places]


def _name(data: bytes, pos: int, memo: list[Any]) -> tuple[Any, int]:
    """Return the string that is spelled out or fetched from the memo at `pos`, or HOLE; and the position after it."""
    opcode = data[pos : pos + 1]
    if opcode == b"X":
        end = pos + 5 + int.from_bytes(data[pos + 1 : pos + 5], "little")
        try:
            return str(data[pos + 5 : end], "utf-8", "surrogatepass"), end
        except UnicodeDecodeError:
            return HOLE, end
    if opcode not in (b"h", b"j"):
        return HOLE, pos
    end = pos + (2 if opcode == b"h" else 5)
    return (*_recalled(data[pos:end], memo), HOLE)[0], end


class _Kind(NamedTuple):
    """What tensors of one kind have in common: the function that the pickle calls for them, the `Maker` that makes them
    instead, and the location of their storage."""

    function: Any
    make: Maker
    location: Any


class Phrases:
    """Reads the phrases of one pickle. `maker` returns what makes the tensors of a kind, or None; if not `is_exact`,
    whatever their offset is."""

    def __init__(self, maker: Callable[[Phrase], Maker | None], *, is_exact: bool = True) -> None:
        self._is_exact = is_exact
        self._maker = maker
        self._kinds: dict[_Spelled, _Kind | None] = {}

    def forget(self) -> None:
        """Clear the cache: a memo entry was replaced, so opcodes that fetch it may mean something else."""
        self._kinds.clear()

    def read(self, data: bytes, pos: int, stack: list[Any], memo: list[Any]) -> tuple[int, int]:
        """Make the tensor of the phrase at `pos`, whose function is on top of `stack`, and those of the phrases that
        follow it as values of a dict, each after its key. Return the position after the last, and how many they are;
        maybe 0."""
        count, at, name = 0, pos, None
        while name is not HOLE and (found := _PHRASE(data, at)):
            (
                put, function, head, length, key_text, key_put, key_get, location, location_put, numel, id_put, offset,
                size, size_put, stride, stride_put, flag, hooks, hooks_put, args_put, last_put,
            ) = found.groups(b"")  # fmt: skip
            # A dict entry has its function, and a key that is either spelled out and stored, or fetched from the memo.
            if count and (not function or bool(put) != (data[pos] == 0x58)):
                break
            spelled = function, head, location, numel, offset if self._is_exact else b"K\0", size, stride, flag, hooks
            if spelled in self._kinds:
                kind = self._kinds[spelled]
            else:
                if len(self._kinds) == _KINDS_KEPT:
                    self._kinds.clear()
                kind = self._kinds[spelled] = self._kind(spelled, stack[-1], memo)
            key = _recalled(key_get, memo)[0] if key_get else str(key_text, "ascii")
            if kind is None or type(key) is not str or (not count and kind.function is not stack[-1]):
                break
            if not (key.isascii() and key.isdecimal()) or (key_put and len(key) != length[0]):
                break
            lost = id_put + size_put + stride_put + hooks_put + args_put
            puts = put + key_put + location_put + lost + last_put
            made = kind.make(key) if _in_order(puts, len(memo)) else None
            if made is None:
                break
            if count == 0:
                stack[-1] = made
            else:
                stack += name, made
            if put:
                memo.append(name)
            if key_put:
                memo.append(key)
            if location_put:
                memo.append(kind.location)
            # A lean run does not keep the persistent id, hooks, arguments, nor a size or stride that is not empty.
            memo += _HOLES[len(lost)]
            memo.append(made)
            count, pos = count + 1, found.end()
            name, at = _name(data, pos, memo)
        return pos, count

    def _kind(self, spelled: _Spelled, top: Any, memo: list[Any]) -> _Kind | None:
        """Return the kind of tensors that are spelled so; None if nothing makes them. `top` is the default function."""
        named, head, location, numel, offset, size, stride, flag, hooks = spelled
        function, tag, cls, made_of = *(_recalled(named, memo) or [top]), *_recalled(head + hooks, memo)
        if location.startswith(b"X"):
            where: Any = str(location[5:], "ascii") if location[1] == len(location) - 5 else None
        else:
            (where,) = _recalled(location, memo)
        if any(each is HOLE for each in (function, tag, cls, where, made_of)):
            return None
        (count,), (first,) = _ints(numel), _ints(offset)
        phrase = Phrase(function, tag, cls, where, count, first, _ints(size), _ints(stride), flag == b"\x88", made_of)
        make = self._maker(phrase)
        return None if make is None else _Kind(function, make, where)
