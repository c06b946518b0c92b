"""What the containers of torch files (zip, stream, tar) have in common: the storages in them, what reading gives."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, LimitError, UnsafeError
from ckptconv.pickles import attacks
from ckptconv.pickles.machine import Loaded, load
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.vocabulary import PLAIN, Limits, TruncatedError, Vocabulary
from ckptconv.storage.files import BufferedReader, Reader
from ckptconv.storage.records import Records
from ckptconv.tensors.moves import File

# The longest description that is read: a million tensors take a seventh of this.
MAX_PICKLE = 1 << 30

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
        self.file = reader.file
        self._buffer = BufferedReader(reader)
        self._stop = stop
        self._limits = limits
        # How much is read in the hope that a pickle ends in it; twice as much each time that it does not.
        self._window = window

    @property
    def bytes_read(self) -> int:
        """How many bytes were read to find the pickles."""
        return self._buffer.bytes_read

    def where(self, what: str) -> str:
        """The name of a pickle in errors."""
        return f"{self.file.path} ({what})"

    def corrupt(self, reason: str, hint: str = "") -> CorruptError:
        return CorruptError(f"{self.file.path} is not a sound file of torch.save: {reason}.", hint)

    def load(self, what: str, words: Vocabulary = PLAIN, before: bytes = b"") -> Loaded:
        """The next pickle, which is `what` for people.

        `before` is how the pickle after it most likely begins. Where that is not to be seen, this one has hardly ended,
        and a large one is not read again and again in vain.
        """
        length = self._window
        while True:
            data = self._read_on(length)
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
                        f"{self.file.path}: {what} takes more than {length} bytes; at most {MAX_PICKLE} are read."
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
        data = self._read_on(max(length, self._window))[:length]
        if len(data) != length:
            raise self.corrupt(f"it ends at byte {self._stop}, within {what}: it was cut short", AGAIN)
        self.position += length
        return data

    def read_at(self, offset: int, length: int) -> bytes:
        """Bytes of the file that are no pickle, from anywhere."""
        return self._buffer.read_past(offset, length)

    def _read_on(self, length: int) -> bytes:
        """`length` bytes from the position on, or more, or as many as there are."""
        return self._buffer.read_on(self.position, length, self._stop)


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
