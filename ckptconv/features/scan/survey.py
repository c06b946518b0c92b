"""Reads the names and calls of a pickle of any length, a window at a time, and keeps none of its objects.

The machine is the same. It drops an object as soon as no call needs it: `DROPPED` stands for it. A call of `DROPPED`,
or one that is known only for some arguments, is an unknown call. Memory is bounded for any pickle; a pickle for which
that does not suffice exceeds the limits.
"""

from __future__ import annotations

import array
import re
import struct
from collections.abc import Callable
from typing import Any

from ckptconv.features.scan.grammar.patterns import is_name
from ckptconv.features.scan.numpy_elements import DTYPE
from ckptconv.features.scan.phrases import TensorPhrases
from ckptconv.pickles import watching
from ckptconv.pickles.containers import PYTHON, Keys
from ckptconv.pickles.keys import HashedKeys
from ckptconv.pickles.machine import Machine, run
from ckptconv.pickles.nodes import Global, Opaque, today
from ckptconv.pickles.opcodes import HOLE
from ckptconv.pickles.vocabulary import Constructor, ExcessiveError, Limits, MalformedError, Vocabulary
from ckptconv.process import no_garbage

# Stand for a value that was not kept, and for a container of Python's own whose contents were not kept.
DROPPED, _CONTAINER = Opaque(Global("some", "value")), Opaque(Global("some", "container"))
# Bytes that are read at a time, the longest frame, and the longest instruction that is not dropped. Picklers end a
# frame after 64 KiB.
_WINDOW, _FRAME, _INSTRUCTION = 1 << 17, 1 << 18, 1 << 22
# The most marks on the stack; the values below them that are kept if there are more; and those of each mark then.
_MARKS, _VALUES, _FEW = 20_000, 50_000, 8
# The most entries of the memo that are kept, the most bytes of the texts among them, and the most characters of one.
_ENTRIES, _TEXTS, _TEXT = 6_000_000, 1 << 24, 80
# The most names, characters of all names, and entries of the memo that are out of order.
_NAMES, _NAMED, _SPILLED = 20_000, 1 << 21, 10_000
# Keys that are distinguished at once, the bits of such numbers, and the most other keys that are remembered.
_PLAIN_KEYS, _WORD, _ENTRIES_SEEN = frozenset({str, bytes, int, bool, type(None)}), 60, 100_000
# The most levels of objects in a key.
_LEVELS = 16
# The most objects that are kept with their arguments, and the most parts and characters of these.
_OBJECTS, _PARTS, _CHARACTERS = 20_000, 16, 100
# The size of bytes from which on they are not kept.
_BYTES = 1 << 10
# Instructions with a length: its form, and whether bytes follow that are not text.
_LENGTHS = {
    ord("X"): ("<I", False),
    0x8D: ("<Q", False),
    ord("B"): ("<I", True),
    0x8E: ("<Q", True),
    0x96: ("<Q", True),
    ord("T"): ("<I", True),
}
# Beginnings of instructions with lines of text that Python refuses: no number, no quote, a name with a null byte, and a
# persistent id, which its own unpickler does not know.
_REFUSED = re.compile(rb"[ILgpF](?!\s*[-+]?[.0-9iInN])|S[^\"']|[ci][^\n.]*\0|P")
# The class of objects that say in which file data is, in torch.distributed.checkpoint, and their attribute with its
# name.
_IN_FILES, _FILE = "_StorageInfo", "relative_path"
# The most entries of a dict, and of a list, that are kept.
_ITEMS, _APPENDED = 64, 16
# Functions whose results matter for the judgement of later calls.
_MADE = frozenset({("_codecs", "encode"), ("numpy", "dtype")})
_WITH_ARGUMENTS = frozenset({"getattr", "dtype", "Decimal", "Fraction"})
# Classes that are useless without their arguments.
_NUMBERS = frozenset({"Decimal", "Fraction"})
# A storage.
_A_STORAGE = Opaque(Global("pickle", "persistent_load"))


class Passed(bytes):
    """Bytes that were skipped: `length` bytes from byte `position` of the pickle."""

    position: int
    length: int


def survey(
    read_at: Callable[[int, int], bytes],
    size: int,
    vocabulary: Vocabulary,
    *,
    where: str,
    limits: Limits,
    met: Callable[[bytes, bytes, Global | None], None],
    placed: Callable[[str | None], None] = lambda name: None,
) -> int:
    """Read the pickle that begins with byte 0 of `size` bytes, which `read_at` returns in parts. Return its length.

    `watching.watched` sees its names and calls, and no value. `met` is called with bytes in it, or `Passed`, their
    beginning, and the function that is called with them, None when they first occur; `placed` with the name of each
    file that an object refers to, None for a name that was not kept. Raises the errors of `load`, and LimitError for a
    pickle whose parts are too large to be judged.
    """
    with no_garbage():
        return run(_Survey(read_at, size, vocabulary, where, limits, met, placed)).end


class _Memo:
    """A memo that keeps only names, objects and short texts, and takes four bytes for an entry."""

    def __init__(self, built: Callable[[Opaque], Opaque], lost: Callable[[list[Any]], None]) -> None:
        self.built, self.lost = built, lost
        self._codes = array.array("I")
        self._count = 0
        self._kept: list[Any] = [DROPPED]
        self._places = {id(DROPPED): 0}
        self._texts = bytearray()

    def __len__(self) -> int:
        return self._count

    def append(self, value: Any) -> None:
        if self._count < _ENTRIES:
            self._codes.append(self._code(value))
        self._count += 1

    def __iadd__(self, holes: list[Any]) -> _Memo:
        self._codes.extend([self._code(HOLE)] * min(len(holes), _ENTRIES - len(self._codes)))
        self._count += len(holes)
        return self

    def __setitem__(self, index: int, value: Any) -> None:
        if index < len(self._codes):
            self._codes[index] = self._code(value)

    def __getitem__(self, index: int) -> Any:
        code = self._codes[index] if index < len(self._codes) else 0
        if not code & 1:
            value = self._kept[code >> 1]
            # A stored object may have got its state since.
            return self.built(value) if type(value) is Opaque and value not in (DROPPED, _CONTAINER) else value
        at = code >> 1
        return str(self._texts[at + 1 : at + 1 + self._texts[at]], "ascii")

    def clear(self) -> None:
        del self._codes[:], self._kept[1:], self._texts[:]
        self._count = 0

    def _code(self, value: Any) -> int:
        kind = type(value)
        if kind is str:
            if len(value) > _TEXT or len(self._texts) > _TEXTS or not value.isascii():
                return 0
            at = len(self._texts)
            self._texts.append(len(value))
            self._texts += value.encode()
            return at << 1 | 1
        # Picklers store no numbers.
        is_part = (kind is tuple or kind is bytes) and len(self._kept) < _OBJECTS and _is_small(value)
        if kind is not Global and kind is not Opaque and not is_part:
            if kind is tuple:
                self.lost([value])
            return 0
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = len(self._kept)
            self._kept.append(value)
        return place << 1


class _NoKeys(HashedKeys, Keys):
    """Keys that are not kept. `levels`: for tokens of objects, by identity, their depth of nesting."""

    def __init__(self, limits: Limits, size: int) -> None:
        super().__init__(limits, size)
        self.levels: dict[int, int] = {}

    def fill(self, target: Any, pairs: Any) -> None:
        pass

    def update(self, target: Any, items: Any) -> None:
        target.add(DROPPED)

    def set_of(self, items: Any) -> set[Any]:
        return {DROPPED} if items else set()

    def check(self) -> None:
        pass

    def _holds(self, container: Any, key: Any) -> bool:
        return False

    def look(self, target: Any, keys: list[Any]) -> None:
        """Raise the errors of `admit` for keys of `target`."""
        for key in keys:
            if type(key) not in _PLAIN_KEYS or (type(key) is int and key.bit_length() > _WORD):
                self.admit(target, key)
            if self.levels.get(id(key), 0) > _LEVELS:
                raise ExcessiveError(f"has a key made of objects nested more than {_LEVELS} levels deep")
        if len(self.seen) > _ENTRIES_SEEN or sum(len(hashes) for _, hashes in self.seen.values()) > _ENTRIES_SEEN:
            self.seen.clear()
        self.weights.clear()
        self._doubtful.clear()


class _Survey(Machine):
    """A run over one pickle that keeps nothing."""

    def __init__(
        self,
        read_at: Callable[[int, int], bytes],
        total: int,
        vocabulary: Vocabulary,
        where: str,
        limits: Limits,
        met: Callable[[bytes, bytes, Global | None], None],
        placed: Callable[[str | None], None],
    ) -> None:
        words = vocabulary._replace(builders={}, persistent=self._a_storage)
        super().__init__(read_at(0, min(_WINDOW, total)), words, where, 0, limits, lean=False)
        self.keys: _NoKeys = _NoKeys(limits, total)
        self.shared: dict[tuple[Global, str, bool, int], Opaque] = {}
        # For each class, the most levels of its objects with states.
        self.deepest: dict[Global, int] = {}
        self.memo = _Memo(self._built, self._judge_lost)  # type: ignore[assignment]
        self.phrases = TensorPhrases(self._a_storage)
        self.read_at, self.total, self.met, self.placed = read_at, total, met, placed
        self.judge = watching.judge(total)
        self.named = 0
        self.objects = 0

    def _a_storage(self, pid: Any) -> Opaque:
        self._opaque_persistent(pid)
        return _A_STORAGE

    def constructor(self, name: tuple[str, str]) -> Constructor | None:
        construct = super().constructor(name)
        if construct is None or name in _MADE:
            return construct
        value = _CONTAINER if today(name) in PYTHON else self._token(Global(*name), "reduce")
        return lambda args: value

    def _token(self, root: Global, how: str, is_built: bool = False, parts: Any = (), level: int = 0) -> Opaque:
        """Return the token for all objects that a call of `root` makes, and that are as deeply nested."""
        levels = self.keys.levels
        level = min(max((level, *(1 + levels.get(id(part), 0) for part in parts))), _LEVELS + 1)
        if is_built:
            # The memo has the objects without their states.
            level = self.deepest[root] = max(level, self.deepest.get(root, 0))
        key = root, how, is_built, level
        token = self.shared.get(key)
        if token is None:
            token = self.shared[key] = Opaque(root, (), None, how, [()] if is_built else [])
            levels[id(token)] = level
        return token

    def _built(self, token: Opaque, state: Any = ()) -> Opaque:
        """Return the token for an object that has got its state."""
        if token.state or token.args or type(token.cls) is not Global:
            return token
        parts = state.values() if type(state) is dict else state if type(state) is tuple else ()
        return self._token(token.cls, token.call, True, parts, self.keys.levels.get(id(token), 0))

    # ---- reading on

    def _loop(self) -> Any:
        while True:
            try:
                return super()._loop()
            except (IndexError, struct.error) as error:
                # An instruction takes its operands before it has any effect, so it can begin again.
                is_short = isinstance(error, struct.error) or self.short or self.pos >= len(self.data)
                if self.around or not is_short or not self._read_on(self.pos - 1):
                    self.start = -self.base
                    raise
                self.short = False

    def _read_on(self, at: int) -> bool:
        """Continue with the instruction at `at`, with more of the bytes after it. Return whether there were more."""
        self._drop()
        position, have = self.base + at, len(self.data) - at
        room = self.total - position
        head = self.read_at(position, min(9, room))
        form, is_bytes = _LENGTHS.get(head[0], ("", False)) if head else ("", False)
        begin = 1 + struct.calcsize(form)
        if form and len(head) >= begin:
            (length,) = struct.unpack_from(form, head, 1)
            if begin + length > room:
                return False
            if length >= _WINDOW:
                self.stack.append(self._passed(position + begin, length) if is_bytes else DROPPED)
                self._window(position + begin + length, _WINDOW)
                return True
        frame = int.from_bytes(head[1:], "little") if head[:1] == b"\x95" and len(head) == 9 else 0
        if have >= room or frame > room:
            return False
        if frame > _FRAME:
            raise ExcessiveError(f"has a frame of {frame} bytes")
        if have >= _INSTRUCTION:
            if _REFUSED.match(head):
                raise MalformedError("has a line that Python cannot read")
            raise ExcessiveError(f"has an instruction of more than {have} bytes")
        self._window(position, max(_WINDOW, 2 * have))
        return True

    def _window(self, position: int, length: int) -> None:
        self._read(self.read_at(position, min(length, self.total - position)), 0, position)

    def _drop(self) -> None:
        """Drop the values on the stack that no call needs."""
        if len(self.marks) > _MARKS:
            raise ExcessiveError(f"has more than {_MARKS} marks")
        parts = [*self.marks, self.stack]
        most = _VALUES if sum(map(len, parts)) <= _VALUES else _FEW
        for part in parts:
            # Keys and values take turns.
            more = max(len(part) - most + 1, 0) // 2 * 2
            dropped = part[most // 2 : most // 2 + more]
            del part[most // 2 : most // 2 + more]
            self._judge_lost(dropped)
            part[:] = map(self._small, part)

    def _judge_lost(self, values: list[Any]) -> None:
        """Judge values that are not kept, like those that are put into a list: their user gets `DROPPED`."""
        if self.judge:
            self.judge.put(values)

    def _small(self, value: Any) -> Any:
        small = _small(value)
        if small is DROPPED and type(value) is tuple:
            self._judge_lost([value])
        return small

    # ---- parts of opcodes

    def _passed(self, position: int, length: int) -> Passed:
        data = Passed()
        data.position, data.length = position, length
        self.met(data, self.read_at(position, min(length, 512)), None)
        return data

    def take(self, length: int) -> bytes:
        data = super().take(length)
        if length >= _BYTES:
            return self._passed(self.base + self.pos - length, length)
        self.met(data, data, None)
        return data

    def charge(self, count: int) -> None:
        pass

    def find(self, module: Any, name: Any) -> Any:
        if module is DROPPED or name is DROPPED:
            if self.judge:
                self.judge.unknown_calls["a name that is defined too far away"] = None
            return DROPPED
        return super().find(module, name)

    def _mention(self, key: tuple[str, str]) -> Global:
        self.named += sum(map(len, key))
        if len(self.globals) >= _NAMES or self.named > _NAMED:
            raise ExcessiveError(f"refers to more than {len(self.globals)} classes")
        return super()._mention(key)

    def put(self, index: int, value: Any) -> None:
        if index > len(self.memo):
            value = self._small(value)
            if len(self.spill) >= _SPILLED:
                raise ExcessiveError(f"has more than {_SPILLED} memo entries out of order")
        super().put(index, value)

    def call(self, function: Any, args: Any, how: str, kwargs: dict[str, Any] | None = None) -> Any:
        if args is DROPPED or type(args) is Opaque:
            args = (DROPPED,)
        elif type(args) is tuple and any(type(arg) is tuple for arg in args):
            # Objects may be hashed and freed through their arguments.
            self.keys.weigh(args)
            self.keys.weights.clear()
        if type(args) is tuple and type(function) is Global:
            for arg in args[:_PARTS]:
                if isinstance(arg, bytes):
                    self.met(arg, arg, function)
        result = super().call(function, args, how, kwargs)
        if type(result) is not Opaque or result is DROPPED or result is _CONTAINER:
            return result if type(result) in (Global, bytes) or result is _CONTAINER else DROPPED
        root = function if type(function) is Global else DROPPED.cls
        if root.name.rpartition(".")[2] in _WITH_ARGUMENTS and self.objects < _OBJECTS and _is_small(result.args):
            self.objects += 1
            result.kwargs = None
            return result
        if self.judge and root.name in _NUMBERS:
            self.judge.unknown_calls["more numbers than the limit"] = None
        return self._token(root, how, parts=args)

    def build(self, state: Any) -> None:
        target = self.stack[-1]
        if type(target) is not Opaque:
            return
        if target is _CONTAINER:
            if self.judge and not (type(state) is dict and all(map(is_name, state))):
                self.judge.unknown_calls["an instruction that sets the state of a container"] = None
            return
        if type(target.cls) is Global and target.cls.name == _IN_FILES:
            name = state.get(_FILE) if type(state) is dict else None
            self.placed(name if type(name) is str else None)
        if self.judge:
            self.judge.build(target, state)
        kept = target.state[:]
        target.state.append(state)
        if self.vocabulary.embedded:
            self.skip_embedded(target)
        if target.args == () or kept:
            target.state[:] = kept
        else:
            # The fields of a dtype are kept too, a dict with few entries.
            parts = state if target.cls == DTYPE and type(state) is tuple else (state,)
            if not all(type(part) is dict or _is_small(part) for part in parts):
                target.state[:] = [DROPPED]
        self.stack[-1] = self._built(target, state)

    def set_items(self, target: Any, items: list[Any]) -> None:
        if len(items) % 2:
            raise MalformedError("sets a key without a value")
        if self.judge:
            if target is _CONTAINER:
                self.judge.put(items)
            else:
                self.judge.items(target, items)
        self.keys.look(target, items[::2])
        if type(target) is dict:
            for key, value in zip(items[::2], items[1::2], strict=True):
                if type(key) is str and len(key) <= _CHARACTERS and (len(target) < _ITEMS or key in target):
                    target[key] = value if type(value) in _KEPT or _is_small(value) else DROPPED
                else:
                    target[DROPPED] = DROPPED

    def append(self, target: Any, items: list[Any]) -> None:
        if self.judge:
            if target is _CONTAINER:
                self.judge.put(items)
            else:
                self.judge.append(target, items)
        if type(target) is list and len(target) < _APPENDED:
            target.extend(
                value if type(value) in _KEPT or _is_small(value) else DROPPED
                for value in items[: max(_APPENDED - len(target), 0)]
            )
            if len(target) >= _APPENDED:
                target[-1] = DROPPED


# Containers are kept where they are: their content was judged when it was put there.
_KEPT = frozenset({dict, list, set})


def _small(value: Any) -> Any:
    """Return `value`, emptied in place, if it may matter for a call; else its token."""
    kind = type(value)
    if kind is dict:
        large = [key for key, content in value.items() if type(content) in _KEPT or not _is_small(content)]
        value.update(dict.fromkeys(large, DROPPED))
    elif kind is list:
        value[:] = [DROPPED] * bool(value)
    elif kind in (set, bytearray):
        value.clear()
    elif kind not in (Global, Opaque, Passed, bool, type(None)) and not _is_small(value):
        return DROPPED
    return value


def _is_small(value: Any) -> bool:
    """Return whether a value has few parts and characters."""
    parts, count = [value], 0
    while parts:
        part = parts.pop()
        count += 1
        kind = type(part)
        if kind is tuple:
            parts += part[: _PARTS + 1]
        elif kind in (str, bytes):
            count += len(part) // _CHARACTERS * _PARTS
        elif kind is int:
            count += _PARTS if part.bit_length() > 64 else 0
        elif kind not in (float, bool, type(None), Global, Opaque, Passed) and part != []:
            return False
        if count > _PARTS:
            return False
    return True
