"""Reads what torch.save writes for a tensor at one match, where opcode by opcode it would be 25.

The tensor, and what is left in the memo, are what the machine would make of the opcodes on a lean run. A phrase that is
not exactly as expected is left to the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from ckptconv.pickles.vocabulary import Maker, Phrase

# In the memo, what is not remembered.
HOLE: Any = object()

_GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....)"
_INTS = rb"(\)|%(i)b\x85|%(i)b%(i)b\x86|%(i)b%(i)b%(i)b\x87|\((?:%(i)b){0,64}t)" % {b"i": _INT}
# What torch.save writes for a tensor once the memo has 256 entries, after the function that makes it; or after the name
# that a dict has for the tensor: then the name's place in the memo, if it was not there before, and the function.
_PHRASE = re.compile(
    rb"(?:(r....)?(%(get)b))?\(\((%(get)b%(get)bX.\0\0\0)([0-9]{1,20})(r....)"
    rb"(%(get)b|X.\0\0\0[a-z]{1,16}(?::[0-9]{1,4})?)(r....)?(%(int)b)t(r....)Q"
    rb"(%(int)b)%(ints)b(r....)?%(ints)b(r....)?([\x88\x89])(%(get)b)\)R(r....)t(r....)R(r....)"
    % {b"get": _GET, b"int": _INT, b"ints": _INTS},
    re.DOTALL,
).match
_PIECES = re.compile(rb"K(.)|M(..)|J(....)", re.DOTALL)
_GETS = re.compile(rb"h(.)|j(....)", re.DOTALL)
# As numbers, by their length: so many LONG_BINPUTs from place 0 on, and what each place more adds.
_FIRST_PUTS = {5 * n: sum((0x72 | at << 8) << 40 * at for at in range(n)) for n in range(10)}
_NEXT_PUTS = {5 * n: sum(1 << 40 * at + 8 for at in range(n)) for n in range(10)}
# By the length of the LONG_BINPUTs of what a lean run does not remember.
_HOLES = {5 * n: [HOLE] * n for n in range(6)}
_KINDS_KEPT = 4096

# How tensors that are alike are spelled: the function, the storage but for its key, its location and size, the tensor's
# offset, size, stride and flag, and its hooks.
_Spelled: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]


def _in_order(puts: bytes, first: int) -> bool:
    """Whether LONG_BINPUTs are to one place after the other, from `first` on."""
    return int.from_bytes(puts, "little") == _FIRST_PUTS[len(puts)] + first * _NEXT_PUTS[len(puts)]


def _ints(opcodes: bytes) -> tuple[int, ...]:
    """The integers that BININT1, BININT2 and BININT push."""
    found = _PIECES.findall(opcodes)
    return tuple(int.from_bytes(a or b or c, "little", signed=bool(c)) for a, b, c in found)


def _recalled(gets: bytes, memo: list[Any]) -> list[Any]:
    """What BINGET and LONG_BINGET push, or a hole."""
    places = (int.from_bytes(short or long, "little") for short, long in _GETS.findall(gets))
    return [memo[place] if place < len(memo) else HOLE for place in places]


def _name(data: bytes, pos: int, memo: list[Any]) -> tuple[Any, int]:
    """The name that is spelled or recalled at `pos`, or a hole; and where that ends."""
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
    """Tensors that are alike: the function that a pickle calls for them, what makes them instead, how long the key of
    their storage is, and the storage's location."""

    function: Any
    make: Maker
    length: int
    location: Any


class Phrases:
    """Reads the phrases of one pickle; `maker` says what makes the tensors of those that are alike."""

    def __init__(self, maker: Callable[[Phrase], Maker | None]) -> None:
        self._maker = maker
        self._kinds: dict[_Spelled, _Kind | None] = {}

    def forget(self) -> None:
        """What is in the memo was replaced, and what is spelled with its places may mean something else."""
        self._kinds.clear()

    def read(self, data: bytes, pos: int, stack: list[Any], memo: list[Any]) -> tuple[int, int]:
        """Make the tensor of the phrase at `pos`, of the function on top of the stack, and those that follow it as
        members of a dict, each after its name. Where the last of them ends, and how many they are: there may be none.
        """
        count, at, name = 0, pos, None
        while name is not HOLE and (found := _PHRASE(data, at)):
            (
                put, function, head, key_text, key_put, location, location_put, numel, id_put, offset, size, size_put,
                stride, stride_put, flag, hooks, hooks_put, args_put, last_put,
            ) = found.groups(b"")  # fmt: skip
            # As a member it has a function, and a name that is either spelled and remembered, or recalled.
            if count and (not function or bool(put) != (data[pos] == 0x58)):
                break
            spelled = function, head, location, numel, offset, size, stride, flag, hooks
            if spelled in self._kinds:
                kind = self._kinds[spelled]
            else:
                if len(self._kinds) == _KINDS_KEPT:
                    self._kinds.clear()
                kind = self._kinds[spelled] = self._kind(spelled, stack[-1], memo)
            key = str(key_text, "ascii")
            if kind is None or len(key) != kind.length or (not count and kind.function is not stack[-1]):
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
            memo.append(key)
            if location_put:
                memo.append(kind.location)
            # Not remembered on a lean run: the id, the size and stride unless they are empty, hooks, and arguments.
            memo += _HOLES[len(lost)]
            memo.append(made)
            count, pos = count + 1, found.end()
            name, at = _name(data, pos, memo)
        return pos, count

    def _kind(self, spelled: _Spelled, top: Any, memo: list[Any]) -> _Kind | None:
        """What makes tensors that are spelled so, if anything does; of the function `top` if none is spelled."""
        named, head, location, numel, offset, size, stride, flag, hooks = spelled
        function, tag, cls, made_of = *(_recalled(named, memo) or [top]), *_recalled(head[:-5] + hooks, memo)
        if location.startswith(b"X"):
            where: Any = str(location[5:], "ascii") if location[1] == len(location) - 5 else None
        else:
            (where,) = _recalled(location, memo)
        if any(each is HOLE for each in (function, tag, cls, where, made_of)):
            return None
        (count,), (first,) = _ints(numel), _ints(offset)
        phrase = Phrase(function, tag, cls, where, count, first, _ints(size), _ints(stride), flag == b"\x88", made_of)
        make = self._maker(phrase)
        return None if make is None else _Kind(function, make, head[-4], where)
