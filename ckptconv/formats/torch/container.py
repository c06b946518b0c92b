"""The parts that the containers of torch files share: numbers of storages, a reader of pickles, the result."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptconv.errors import AGAIN, CkptconvError, CorruptError, LimitError, TruncatedError, UnsafeError
from ckptconv.pickles.machine import Loaded, load
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.refusing import attacks_are_refused
from ckptconv.pickles.vocabulary import PLAIN, Limits, Vocabulary
from ckptconv.storage.files import BufferedReader
from ckptconv.storage.reading import Reader
from ckptconv.storage.records import Records
from ckptconv.tensors.lazy import LazyTensor, untagged
from ckptconv.tensors.moves import File

# The longest description read, in bytes: a million tensors take a seventh of this.
MAX_PICKLE = 1 << 30

# The most bytes in which to search for the end of a pickle before parsing it.
_SEARCHED = 1 << 26
# Headers of pickles without frames: all pickles of a file begin with the same one.
_PROTOCOLS = (b"\x80\x02", b"\x80\x03")
# Bytes of a refused file that are searched for an attack. A file with nothing but an attack is short.
SCANNED = 1 << 20

# The magic number of the stream format, and how it is pickled by protocols 2 and up, and by protocol 1.
STREAM_MAGIC = 0x1950A86A20F9469CFC6C
_MAGICS = (b"\x8a\x0a" + STREAM_MAGIC.to_bytes(10, "little") + b".", b"L%dL\n." % STREAM_MAGIC)
# Bytes at the start of a file that hold it: the protocol and a frame may precede it.
STREAM_HEAD = 40
# Members of TorchScript archives of torch 1.0 to 1.2: the description (data.pkl in later ones), attributes and tensors.
SCRIPT_DESCRIPTION, SCRIPT_ATTRIBUTES, SCRIPT_RECORDS = "model.json", "attributes.pkl", "tensors/"

_containers = itertools.count()


class Taken(NamedTuple):
    """A tree with modules replaced by their state dicts, notes and warnings for people, and the classes left in it.

    `values` are attributes of the modules that are plain values, as CLASS.NAME; no state dict has them.
    """

    tree: Any
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    opaque: tuple[Global, ...]
    values: Mapping[str, Any] = MappingProxyType({})


def is_stream(head: bytes) -> bool:
    """Whether a file that begins with `head` (STREAM_HEAD bytes) is in the stream format."""
    return any(magic in head[:STREAM_HEAD] for magic in _MAGICS)


def first_identity() -> int:
    """Return the number of the first storage of a container; storage numbers are unique in this process."""
    return next(_containers) << 32


class LongError(LimitError):
    """A pickle is longer than the limit."""


class Pickles:
    """Reads consecutive pickles in bytes `start` to `stop` of a file; only parsing them gives their lengths.

    `position` is where the next pickle begins, and may be set. `last` holds the bytes of the last pickle read.
    `globals` are the names that the pickles of plain data mention; `opaque` are the unknown names that they call.
    """

    def __init__(
        self,
        reader: Reader,
        start: int,
        stop: int,
        limits: Limits,
        window: int = 1 << 16,
        longest: int | None = None,
    ) -> None:
        self.position = start
        self.last = b""
        self.globals: dict[Global, None] = {}
        self.opaque: dict[Global, None] = {}
        self.file = reader.file
        self._buffer = BufferedReader(reader)
        self._stop = stop
        self._limits = limits
        # Bytes read at first for a pickle; doubled as long as the pickle does not end within them.
        self._window = window
        self._longest = MAX_PICKLE if longest is None else longest

    @property
    def bytes_read(self) -> int:
        """The bytes read so far."""
        return self._buffer.bytes_read

    def where(self, part: str) -> str:
        """Return the name of a pickle for errors."""
        return f"{self.file.path} ({part})"

    def corrupt(self, reason: str, hint: str = "") -> CorruptError:
        return CorruptError(self._unsound(reason), hint)

    def truncated(self, reason: str) -> TruncatedError:
        return TruncatedError(f"{self._unsound(reason)[:-1]}: it was cut short.", AGAIN)

    def _unsound(self, reason: str) -> str:
        return f"{self.file.path} is not a valid file of torch.save: {reason}."

    def load(self, part: str, words: Vocabulary = PLAIN, before: bytes = b"") -> Loaded:
        """Read the next pickle; `part` names it in errors.

        `before` is the likely beginning of the pickle after it. As long as the buffer lacks that, this pickle has
        probably not ended, so a large one is not parsed again and again in vain.
        """
        length = self._window
        while True:
            data = self._read_on(length)
            end = b"." + data[:2] + before if before and data[:2] in _PROTOCOLS else b""
            if end not in data and len(data) >= length < min(_SEARCHED, self._longest):
                length *= 2
                continue
            try:
                loaded = load(data, words, where=self.where(part), limits=self._limits)
            except TruncatedError:
                if self.position + len(data) >= self._stop:
                    raise self.truncated(f"it ends at byte {self._stop}, within {part}") from None
                if length >= self._longest:
                    raise LongError(
                        f"{self.file.path}: {part} takes more than {length} bytes; at most {self._longest} are allowed."
                    ) from None
                length *= 2
            else:
                self.last = data[: loaded.end]
                if words is PLAIN:
                    self.globals.update(dict.fromkeys(loaded.globals))
                    self.opaque.update(dict.fromkeys(loaded.opaque))
                self.position += loaded.end
                return loaded

    def take(self, length: int, part: str) -> bytes:
        """Return the next `length` bytes, which are not a pickle; `part` names them in errors."""
        data = self._read_on(max(length, self._window))[:length]
        if len(data) != length:
            raise self.truncated(f"it ends at byte {self._stop}, within {part}")
        self.position += length
        return data

    def read_at(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset` on, anywhere in the file, without moving `position`."""
        return self._buffer.read_past(offset, length)

    def _read_on(self, length: int) -> bytes:
        """Return at least `length` bytes from `position` on, or as many as there are."""
        return self._buffer.read_on(self.position, length, self._stop)


def refuse_attack(data: bytes, where: str, most: int = 1) -> None:
    """Raise UnsafeError if there is an attack among the first `most` pickles of `data`.

    Another reader would run these pickles, although this one refuses the file.
    """
    at = 0
    for _ in range(most if attacks_are_refused() else 0):
        try:
            at = load(data, where=where, start=at).end
        except UnsafeError:
            raise
        except CkptconvError:
            return


def is_pickle(data: bytes, where: str, *, or_begins: bool = False) -> bool:
    """Whether `data` begins with a complete pickle; with `or_begins`, also with the beginning of a longer one.

    `where` names it in errors. Raise UnsafeError for an attack.
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


class TorchFile(NamedTuple):
    """The content of a torch file: its tree, and facts about it.

    `opaque` are the classes and functions kept as inert data; `globals` are all that are mentioned. `records` are the
    container's storages, used or not. `bytes_read` counts the bytes read to open the file. `container` is its name in
    messages; `warnings` and `notes` are for people too. `stem` is the name under which the file was written, without
    suffix, if the file says so.
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
    notes: tuple[str, ...] = ()
    stem: str = ""


def tensors_in(state: Mapping[Any, Any]) -> dict[str, LazyTensor]:
    """Return the tensors of a state dict, without the tags of frameworks."""
    return {
        name: untagged(value)
        for name, value in state.items()
        if isinstance(name, str) and isinstance(value, LazyTensor)
    }
