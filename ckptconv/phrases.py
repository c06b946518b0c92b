"""Reads what torch.save writes for a tensor at one match, where opcode by opcode it would be 25.

The tensor, and what is left in the memo, are what the machine would make of the opcodes on a lean run. A phrase that is
not exactly as expected is left to the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from .vocabulary import Maker, Phrase

# In the memo, what is not remembered.
HOLE: Any = object()

_GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....)"
_PUT = rb"((?:r....)|)"
_INTS = rb"(\)|%(i)b\x85|%(i)b%(i)b\x86|%(i)b%(i)b%(i)b\x87|\((?:%(i)b){0,64}t)" % {b"i": _INT}
# What torch.save writes for a tensor after the function that makes it, once the memo has 256 entries: at one match
# what would be 25 opcodes. Groups of what is the same for many tensors, and of the places in the memo, alternate.
_PHRASE = re.compile(
    rb"\(\((%(get)b%(get)bX.\0\0\0)([0-9]{1,20})(r....)(%(get)b|X.\0\0\0[a-z]{1,16}(?::[0-9]{1,4})?)%(put)b(%(int)b)t(r....)Q"
    rb"(%(int)b)%(ints)b%(put)b%(ints)b%(put)b([\x88\x89])(%(get)b)\)R(r....)t(r....)R(r....)"
    % {b"get": _GET, b"put": _PUT, b"int": _INT, b"ints": _INTS},
    re.DOTALL,
).match
_KIND = (1, 4, 6, 8, 9, 11, 13, 14)
_PUTS = (3, 5, 7, 10, 12, 15, 16, 17)
_KEY = 2
_PIECES = re.compile(rb"K(.)|M(..)|J(....)", re.DOTALL)
# As numbers, by their length: so many LONG_BINPUTs from place 0 on, and what each place more adds.
_FIRST_PUTS = {5 * n: sum((0x72 | at << 8) << 40 * at for at in range(n)) for n in range(9)}
_NEXT_PUTS = {5 * n: sum(1 << 40 * at + 8 for at in range(n)) for n in range(9)}
_GETS = re.compile(rb"h(.)|j(....)", re.DOTALL)
# By the length of the LONG_BINPUTs of a phrase, for all but the first and the last.
_HOLES = {5 * n: [HOLE] * (n - 2) for n in range(2, 9)}
_KINDS_KEPT = 4096


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
        # By how they are spelled.
        self._kinds: dict[tuple[bytes, ...], _Kind | None] = {}

    def forget(self) -> None:
        """What is in the memo was replaced, and what is spelled with its places may mean something else."""
        self._kinds.clear()

    def read(self, data: bytes, start: int, stack: list[Any], memo: list[Any]) -> int:
        """Make the tensor of the phrase at `start`, of the function on top of the stack, and say where the phrase ends;
        0 if there is none, or none that can be made at once."""
        found = _PHRASE(data, start)
        if found is None:
            return 0
        spelled = found.group(*_KIND)
        if spelled in self._kinds:
            kind = self._kinds[spelled]
        else:
            if len(self._kinds) == _KINDS_KEPT:
                self._kinds.clear()
            kind = self._kinds[spelled] = self._kind(memo, stack[-1], *spelled)
        key = str(found[_KEY], "ascii")
        if kind is None or kind.function is not stack[-1] or len(key) != kind.length:
            return 0
        puts = found.group(*_PUTS)
        together = b"".join(puts)
        made = kind.make(key) if _in_order(together, len(memo)) else None
        if made is None:
            return 0
        memo.append(key)
        if puts[1]:
            memo.append(kind.location)
        # What a lean run does not remember: the id, the size and stride unless they are empty, hooks, and arguments.
        memo += _HOLES[len(together) - len(puts[1])]
        memo.append(made)
        stack[-1] = made
        return found.end()

    def _kind(
        self,
        memo: list[Any],
        function: Any,
        head: bytes,
        location: bytes,
        numel: bytes,
        offset: bytes,
        size: bytes,
        stride: bytes,
        flag: bytes,
        hooks: bytes,
    ) -> _Kind | None:
        """What makes tensors that are spelled so, if anything does."""
        tag, cls = _recalled(head[:-5], memo)
        (made_of,) = _recalled(hooks, memo)
        if location.startswith(b"X"):
            where: Any = str(location[5:], "ascii") if location[1] == len(location) - 5 else None
        else:
            (where,) = _recalled(location, memo)
        if any(each is HOLE for each in (tag, cls, where, made_of)):
            return None
        (count,), (first,) = _ints(numel), _ints(offset)
        phrase = Phrase(function, tag, cls, where, count, first, _ints(size), _ints(stride), flag == b"\x88", made_of)
        make = self._maker(phrase)
        return None if make is None else _Kind(function, make, head[-4], where)
