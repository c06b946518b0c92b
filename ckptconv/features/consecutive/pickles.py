"""Reads pickles that follow each other in a file, as the containers of torch before 1.6 have them."""

from __future__ import annotations

from ckptconv.errors import AGAIN, CorruptError, LimitError, TruncatedError
from ckptconv.formats.torch.container import MAX_PICKLE
from ckptconv.pickles.machine import Loaded, load
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.vocabulary import PLAIN, Limits, Vocabulary
from ckptconv.storage.buffered import BufferedReader
from ckptconv.storage.files import is_far
from ckptconv.storage.reading import Reader

# The most bytes in which to search for the end of a pickle before parsing it.
_SEARCHED = 1 << 26
# Headers of pickles without frames: all pickles of a file begin with the same one.
_PROTOCOLS = (b"\x80\x02", b"\x80\x03")


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
        # Bytes that were read, and from where on.
        self._begin, self._data = 0, b""
        self._buffer = BufferedReader(reader, far=is_far(reader.file.path))
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
                        f"{self.file.path}: {part} has more than {length} bytes; at most {self._longest} are allowed."
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
        """Return at least `length` bytes from `position` on, or as many as there are.

        Of the bytes that the last call returned, only those before `position` are dropped; the rest is not read again.
        """
        start, skipped = self.position, self.position - self._begin
        kept = self._data[skipped:] if 0 <= skipped < len(self._data) else b""
        end, wanted = start + len(kept), min(start + length, self._stop)
        self._begin, self._data = start, kept + self.read_at(end, wanted - end) if wanted > end else kept
        return self._data
