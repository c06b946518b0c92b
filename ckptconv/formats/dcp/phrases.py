"""Read each entry of a checkpoint's description with a regular expression, instead of 60 opcodes one by one.

Entries are as Python's pickler writes them at protocols 4 and 5, once what they share is in the memo. What is made of
them equals what the machine makes of the opcodes with the same vocabulary. A phrase that does not match exactly is left
to the machine.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from ckptconv.pickles.fastpath import GET, HOLE, INT, fetched, ints, recalled, text_of
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.pickles.vocabulary import Builder, Constructor, MalformedError, Vocabulary

# An object whose attributes follow, after its class; a torch.Size, made or fetched; and a place in a file.
_NEW = rb"\)\x81\x94\}\x94\("
_SIZE = (
    rb"(?:%(get)b(?:\)|%(int)b\x85\x94|%(int)b%(int)b\x86\x94|%(int)b%(int)b%(int)b\x87\x94|\((?:%(int)b){4,64}t\x94)"
    rb"\x85\x94R\x94|%(get)b)" % {b"get": GET, b"int": INT}
)
_BYTES = rb"(?:%b|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7})" % INT
# A name fetched; or spelled out and stored, as those are that came from another rank.
_NAME = rb"(?:%b|\x8c.[ -~]{1,255}\x94)" % GET
# The longest GET, and what follows the arguments of a call of torch.Size: TUPLE1, MEMOIZE, REDUCE, MEMOIZE.
_LONGEST_GET, _CALLED = 5, 4
# Opcodes of tensors that are remembered, in bytes, and places that are alike.
_KEPT, _KINDS_KEPT = 1 << 20, 4096
# Objects before a description is worth the patterns.
FEW = 200
# Containers and results of calls, beside the sizes, in a tensor, in a chunk, and in a key with its place.
_TENSOR_COST, _CHUNK_COST, _PLACE_COST = 4, 2, 4

# The parts of a ChunkStorageMetadata.
_CHUNK = (GET, _NEW, GET, _SIZE, GET, _SIZE, b"ub")
# Of a TensorStorageMetadata, with its TensorProperties, after its class.
_TENSOR = (
    *(_NEW, GET, GET, rb"\)\x81\x94\(", GET, GET, rb"[\x88\x89]", GET, rb"[\x88\x89]", b"t\x94b"),
    *(GET, _SIZE, GET, rb"\]\x94", rb"\(?(?:%b){1,1000}[ae]" % b"".join(_CHUNK), b"ub"),
)
# Of a MetadataIndex after the name in it, and the _StorageInfo that follows, up to its offset.
_PLACE = (GET, rb"(?:%b|N)" % INT, GET, rb"(?:%b|N)" % _SIZE, b"ub", GET, _NEW, GET, GET, GET)


class _Patterns(NamedTuple):
    chunk: re.Pattern[bytes]
    tensor: re.Pattern[bytes]
    place: re.Pattern[bytes]


@functools.cache  # they take longer to compile than a short description to read
def patterns_of() -> _Patterns:
    """Return the patterns of a chunk; of a tensor, with its class or after it: the class, all that follows, and its
    parts; and of a key and place: its class, an attribute and its value, what follows and its parts, the offset, an
    attribute, the length, and one more attribute that is None."""
    chunk, tensor, place = (b"".join(b"(%b)" % part for part in each) for each in (_CHUNK, _TENSOR, _PLACE))
    words = {b"get": GET, b"new": _NEW, b"bytes": _BYTES, b"place": place, b"name": _NAME}
    entry = rb"(%(get)b)?%(new)b(%(get)b)(%(name)b)(%(place)b)(%(bytes)b)(%(get)b)(%(bytes)b)((?:%(get)bN)?)ub" % words
    return _Patterns(
        re.compile(chunk, re.DOTALL),
        re.compile(rb"(%b)?(%b)" % (GET, tensor), re.DOTALL),
        re.compile(entry, re.DOTALL),
    )


class _Made(NamedTuple):
    """A value, what the memo gets with it, and what it costs."""

    value: Any
    memo: list[Any]
    cost: int


class _Kind(NamedTuple):
    """What places have in common: the attributes of their keys and of themselves but for names and numbers, which are
    None; what makes them; what the memo gets after the name, and what they cost."""

    key: dict[str, Any]
    place: dict[str, Any]
    names: tuple[str, str, str]  # the attributes that differ: a name, an offset and a length
    make: tuple[Constructor, Builder, Opaque, Builder]
    memo: list[Any]
    cost: int


class _UnlikeError(Exception):
    """This is not what the phrase is for: the machine reads it."""


class EntryPhrases:
    """Reads the phrases of one description with a vocabulary's tables. See `vocabulary.Phrases`."""

    opening = b")\x81\x94}\x94("

    def __init__(self, words: Vocabulary) -> None:
        self._words = words
        # By class and opcodes. Those that are alike are one object, which nothing else can change.
        self._tensors: dict[tuple[Any, bytes], _Made] = {}
        self._kept = self._met = 0
        self._kinds: dict[tuple[Any, ...], _Kind] = {}

    def forget(self) -> None:
        self._tensors.clear()
        self._kinds.clear()
        self._kept = 0

    def read(self, data: bytes, pos: int, stack: list[Any], memo: list[Any]) -> tuple[int, int]:
        """Read the object at `pos`, whose class is on top of `stack`, and the keys and values of a dict that follow."""
        self._met += 1
        if self._met < FEW or type(stack[-1]) is not Global:
            return pos, 0
        cost, end = 0, pos
        reading = self._read_tensor
        try:
            end, cost = reading(data, pos, stack, memo, True)
            if not cost:
                reading = self._read_place
                end, cost = reading(data, pos, stack, memo, True)
            more = cost
            while more:
                end, more = reading(data, end, stack, memo, False)
                cost += more
        except (_UnlikeError, MalformedError):
            pass
        return end, cost

    def _read_tensor(self, data: bytes, pos: int, stack: list[Any], memo: list[Any], first: bool) -> tuple[int, int]:
        """Read a tensor, after its name unless it is the `first`."""
        at, name = pos, HOLE
        if not first:
            head = data[pos : pos + 2]
            if len(head) < 2 or head[0] != 0x8C:  # SHORT_BINUNICODE
                return pos, 0
            at = pos + 2 + head[1]
            name = text_of(data[pos + 2 : at])
            if name is HOLE or data[at : at + 1] != b"\x94":
                return pos, 0
            at += 1
        found = patterns_of().tensor.match(data, at)
        if not found:
            return pos, 0
        get, opcodes = found.group(1, 2)
        of = stack[-1] if first else get
        made = self._tensors.get((of, opcodes))
        if made is None:
            made = self._tensor(_class(of, first, memo), found, memo)
            self._kept += len(opcodes)
            if self._kept > _KEPT:
                self.forget()
            self._tensors[of, opcodes] = made
        if first:
            stack[-1] = made.value
        else:
            stack += name, made.value
            memo.append(name)
        memo += made.memo
        return found.end(), made.cost

    def _tensor(self, cls: Global, found: re.Match[bytes], memo: list[Any]) -> _Made:
        """Return the object of class `cls` that was found."""
        _, _, _, p, of, _, dtype, layout, grad, form, pinned, _, s, size, c, _, chunks, _ = found.groups()
        # Several are appended after a MARK.
        all_chunks = patterns_of().chunk.findall(chunks)
        if chunks.startswith(b"(") is not chunks.endswith(b"e") or (chunks.endswith(b"a") and len(all_chunks) > 1):
            raise _UnlikeError
        names = _names(p + s + c, memo)
        builder, value = self._new(cls)
        state = (*recalled(dtype + layout, memo), grad == b"\x88", *recalled(form, memo), pinned == b"\x88")
        if builder or any(each is HOLE for each in state):
            raise _UnlikeError
        properties = self._built(fetched(of, memo), state)
        shape = self._size(size, memo)
        held = [HOLE, HOLE, properties, HOLE, *shape.memo, HOLE]
        boxes, cost = [], _TENSOR_COST + shape.cost
        for cls_of, _, o, low, e, extent, _ in all_chunks:
            offsets, sizes = self._size(low, memo), self._size(extent, memo)
            attributes = dict(zip(_names(o + e, memo), (offsets.value, sizes.value), strict=True))
            boxes.append(self._built(fetched(cls_of, memo), attributes))
            held += (boxes[-1], HOLE, *offsets.memo, *sizes.memo)
            cost += _CHUNK_COST + offsets.cost + sizes.cost
        value.state.append(dict(zip(names, (properties, shape.value, boxes), strict=True)))
        return _Made(value, held, cost)

    def _read_place(self, data: bytes, pos: int, stack: list[Any], memo: list[Any], first: bool) -> tuple[int, int]:
        """Read the key of an entry, and its place."""
        found = patterns_of().place.match(data, pos)
        if not found:
            return pos, 0
        get, attribute, name, opcodes, offset, following, length, rest = found.group(1, 2, 3, 4, 15, 16, 17, 18)
        of = stack[-1] if first else get
        like = of, attribute, opcodes, following, rest
        kind = self._kinds.get(like)
        if kind is None:
            if len(self._kinds) == _KINDS_KEPT:
                self.forget()
            kind = self._kinds[like] = self._kind(_class(of, first, memo), found, memo)
        fqn, begin, count = kind.names
        make, build, blank, build_place = kind.make
        key = make(())
        value, spelled = fetched(name, memo), []
        if name[0] == 0x8C:
            value = str(name[2:-1], "ascii")
            spelled = [value]
            if name[1] != len(value):
                return pos, 0
        build(key, {**kind.key, fqn: value})
        place = build_place(blank, {**kind.place, begin: _number(offset), count: _number(length)})
        if first:
            stack[-1] = key
            stack.append(place)
        else:
            stack += key, place
        # The key and its attributes come before the name.
        memo += (HOLE, HOLE, *spelled, *kind.memo)
        return found.end(), kind.cost

    def _kind(self, cls: Global, found: re.Match[bytes], memo: list[Any]) -> _Kind:
        """Return what the place that was found has in common with others."""
        _, attribute, _, _, i, index, o, offset, _, of, _, p, path, begin, _, following, _, rest = found.groups()
        fqn, index_name, offset_name = _names(attribute + i + o, memo)
        file_name, *names = _names(p + begin + following + rest[:-1], memo)
        place_of, at = recalled(of + path, memo)
        build, key = self._new(cls)
        build_place, blank = self._new(place_of)
        if not build or not build_place or at is HOLE:
            raise _UnlikeError
        offsets = _Made(None, [], 0) if offset == b"N" else self._size(offset, memo)
        attributes = {index_name: None if index == b"N" else _number(index), offset_name: offsets.value}
        # A try, as of those that follow no part is looked at.
        if build(key, {fqn: "", **attributes}) is not key:
            raise _UnlikeError
        place = {file_name: at, **dict.fromkeys(names)}
        if type(build_place(blank, {**place, names[0]: 0, names[1]: 0})) in (Opaque, type(NotImplemented)):
            raise _UnlikeError
        held = [*offsets.memo, HOLE, HOLE]
        make = self._words.constructors[cls.module, cls.name]
        return _Kind(
            attributes,
            place,
            (fqn, names[0], names[1]),
            (make, build, blank, build_place),
            held,
            _PLACE_COST + offsets.cost,
        )

    # ---- parts

    def _new(self, cls: Any) -> tuple[Builder | None, Opaque]:
        """Return a new object of class `cls`, and what gives it its state, if that makes something of it."""
        name = (cls.module, cls.name) if type(cls) is Global else None
        make = self._words.constructors.get(name) if name else None
        made = make(()) if make else None
        if name is None or type(made) is not Opaque or made.call != "newobj":
            raise _UnlikeError
        return self._words.builders.get(name), made

    def _built(self, cls: Any, state: Any) -> Any:
        """Return what becomes of an object of class `cls` with its state."""
        build, made = self._new(cls)
        value = build(made, state) if build else made
        if type(value) is not tuple:
            raise _UnlikeError
        return value

    def _size(self, opcodes: bytes, memo: list[Any]) -> _Made:
        """Return the torch.Size that is made or fetched."""
        if len(opcodes) <= _LONGEST_GET:
            value, held = fetched(opcodes, memo), []
        else:
            cut = 2 if opcodes.startswith(b"h") else _LONGEST_GET
            cls, sizes = fetched(opcodes[:cut], memo), ints(opcodes[cut:-_CALLED])
            make = self._words.constructors.get((cls.module, cls.name)) if type(cls) is Global else None
            value = make((sizes,)) if make else None
            held = [*([HOLE] if sizes else []), HOLE, value]
        if type(value) is not tuple:
            raise _UnlikeError
        return _Made(value, held, 1 if held else 0)


def _class(of: Any, first: bool, memo: list[Any]) -> Global:
    """Return the class of an entry: that on the stack for the `first`, else what an opcode fetches."""
    cls = of if first or not of else fetched(of, memo)
    if type(cls) is not Global:
        raise _UnlikeError
    return cls


def _names(gets: bytes, memo: list[Any]) -> list[str]:
    """Return the names of attributes that are fetched, each another."""
    names = recalled(gets, memo)
    if any(type(name) is not str for name in names) or len({*names}) < len(names):
        raise _UnlikeError
    return names


def _number(opcodes: bytes) -> int:
    """Return the integer that BININT1, BININT2, BININT or LONG1 pushes."""
    digits = opcodes[2:] if opcodes.startswith(b"\x8a") else opcodes[1:]
    return int.from_bytes(digits, "little", signed=opcodes[0] in b"J\x8a")
