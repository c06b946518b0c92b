"""What the containers of torch files (zip, stream, tar) have in common: the storages in them, what reading gives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, LimitError, UnsafeError
from ckptconv.pickles import attacks
from ckptconv.pickles.machine import Loaded, load
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.vocabulary import PLAIN, Limits, TruncatedError, Vocabulary
from ckptconv.storage.files import Reader
from ckptconv.storage.paths import is_remote
from ckptconv.storage.records import Records
from ckptconv.tensors.moves import File

# The longest description that is read: a million tensors take a seventh of this.
MAX_PICKLE = 1 << 30

# What lies near is read together, as long as the bytes between are cheaper to read than to skip.
WINDOW = 1 << 20
_GAP_LOCAL, _GAP_REMOTE = 1 << 9, 1 << 18

# How far the end of a pickle is looked for, before it is read to find its end.
_SEARCHED = 1 << 26
# Those without frames begin all alike.
_PROTOCOLS = (b"\x80\x02", b"\x80\x03")
# How much of what is refused is searched for an attack: those that are nothing else are short.
SCANNED = 1 << 20
AGAIN = "Copy or download it again."

_containers = itertools.count()


def first_identity() -> int:
    """The number of the first storage of a container: storages are told apart by number among all of this process."""
    return next(_containers) << 32


def gap_of(file: File) -> int:
    """How many bytes of `file` are cheaper to read than to skip."""
    return _GAP_REMOTE if is_remote(file.path) else _GAP_LOCAL


def nearby(offsets: Iterable[int], length: int, file: File) -> Iterator[list[int]]:
    """Rising offsets of things of `length` bytes in `file`, in groups that are read together."""
    gap = gap_of(file)
    group: list[int] = []
    for offset in offsets:
        if group and (offset > group[-1] + length + gap or offset + length > group[0] + WINDOW):
            yield group
            group = []
        group.append(offset)
    if group:
        yield group


class Pickles:
    """Reads pickles that follow one another in bytes `start` to `stop` of a file; only they know how long they are.

    `position` is where the next one begins, and may be set. `last` is the last one that was read. `globals` and
    `opaque` are what they mention, and of it what they call and is not known, all of them that are plain data.
    """

    def __init__(self, reader: Reader, start: int, stop: int, limits: Limits, window: int = 1 << 16) -> None:
        self.position = start
        self.last = b""
        self.globals: dict[Global, None] = {}
        self.opaque: dict[Global, None] = {}
        self.bytes_read = 0
        self._reader = reader
        self._stop = stop
        self._limits = limits
        # How much is read in the hope that a pickle ends in it; twice as much each time that it does not.
        self._window = window
        # What was read, from byte `_base` on.
        self._base = start
        self._data = b""

    def where(self, what: str) -> str:
        """The name of a pickle in errors."""
        return f"{self._reader.file.path} ({what})"

    def corrupt(self, reason: str, hint: str = "") -> CorruptError:
        return CorruptError(f"{self._reader.file.path} is not a sound file of torch.save: {reason}.", hint)

    def load(self, what: str, words: Vocabulary = PLAIN, before: bytes = b"") -> Loaded:
        """The next pickle, which is `what` for people.

        `before` is how the pickle after it most likely begins. Where that is not to be seen, this one has hardly ended,
        and a large one is not read again and again in vain.
        """
        length = self._window
        while True:
            data = self._ahead(length)
            end = b"." + data[:2] + before if before and data[:2] in _PROTOCOLS else b""
            if end not in data and len(data) >= length < min(_SEARCHED, MAX_PICKLE):
                length *= 2
                continue
            try:
                loaded = load(data, words, where=self.where(what), limits=self._limits)
            except TruncatedError:
                if self.position + len(data) >= self._stop:
                    raise self.corrupt(
                        f"it ends at byte {self._stop}, within {what}: it was cut short", AGAIN
                    ) from None
                if length >= MAX_PICKLE:
                    raise LimitError(
                        f"{self._reader.file.path}: {what} takes more than {length} bytes; at most {MAX_PICKLE} are "
                        "read."
                    ) from None
                length *= 2
            else:
                self.last = data[: loaded.end]
                if words is PLAIN:
                    self.globals.update(dict.fromkeys(loaded.globals))
                    self.opaque.update(dict.fromkeys(loaded.opaque))
                self.position += loaded.end
                return loaded

    def take(self, length: int, what: str) -> bytes:
        """The next `length` bytes, which are no pickle."""
        data = self._ahead(max(length, self._window))[:length]
        if len(data) != length:
            raise self.corrupt(f"it ends at byte {self._stop}, within {what}: it was cut short", AGAIN)
        self.position += length
        return data

    def _ahead(self, length: int) -> bytes:
        """`length` bytes from the position on, or more, or as many as there are."""
        skipped = self.position - self._base
        self._data = self._data[skipped:] if 0 <= skipped < len(self._data) else b""
        self._base = self.position
        done = self._base + len(self._data)
        stop = min(self.position + length, self._stop)
        if stop > done:
            self._data += self._reader.read_at(done, stop - done)
            self.bytes_read += stop - done
        return self._data


def refuse_attack(data: bytes, where: str, most: int = 1) -> None:
    """Raise UnsafeError where an attack is among the pickles that `data` begins with, of which `most` are looked at.

    For what another reader takes for pickles in a file that is refused.
    """
    at = 0
    for _ in range(most if attacks.are_refused() else 0):
        try:
            at = load(data, where=where, start=at).end
        except UnsafeError:
            raise
        except CkptconvError:
            return


def is_pickle(data: bytes, where: str, *, or_begins: bool = False) -> bool:
    """Whether `data` begins with a whole pickle; with `or_begins`, also with a part of one that goes on after it.

    `where` names it in errors. Raises UnsafeError for an attack.
    """
    try:
        load(data, where=where)
    except UnsafeError:
        raise
    except TruncatedError:
        return or_begins
    except CkptconvError:
        return False
    return True


@dataclass(frozen=True)
class TorchFile:
    """What a torch file holds: the tree, and facts about it.

    `opaque` and `globals` name the classes and functions that were kept as inert data, and all that were mentioned.
    `records` are the storages of the container, used or not. `bytes_read` counts what was read to find all this out.
    `container` is its name for people, `warnings` what they should know. `stem` is what the file was called when it was
    written, without its suffix, where it says so.
    """

    value: Any
    file: File
    opaque: tuple[Global, ...]
    globals: tuple[Global, ...]
    byteorder: str
    records: Records
    bytes_read: int
    container: str
    warnings: tuple[str, ...] = ()
    stem: str = ""
