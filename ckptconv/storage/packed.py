"""Readers of files, and of packed files such as compressed members of archives, which a feature unpacks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptconv.errors import LimitError, UnsupportedError
from ckptconv.storage.files import Readers
from ckptconv.storage.reading import Options, Reader
from ckptconv.tensors.moves import File

if TYPE_CHECKING:
    from ckptconv.storage.spool import Spool

# A byte of deflate stands for at most 1,032 bytes: two bits for 258.
MAX_RATIO = 1032
# What unpacks packed files: the module. There, `UNPACKING` has the methods, each with a function that yields the
# content of a file, given the `File`, its `Packed` and a reader of packed bytes; `Contents` opens readers of contents.
UNPACKING: tuple[str, ...] = (
    "ckptconv.features.compressed.unpacking",
)  # fmt: skip


def unpacking(name: str) -> Any:
    """Return the module that unpacks packed files. Raise UnsupportedError for the file `name` if there is none."""
    if not UNPACKING:
        raise UnsupportedError(
            f"{name} is compressed, and the feature compressed is not installed.", "Write the file uncompressed."
        )
    return import_module(UNPACKING[0])


def check_ratio(name: str, packed: int, size: int) -> None:
    """Raise LimitError if `packed` bytes of deflate cannot inflate to `size` bytes."""
    if size > MAX_RATIO * packed:
        raise LimitError(
            f"{name} should inflate from {packed} to {size} bytes, but deflate cannot produce more than "
            f"{MAX_RATIO * packed}."
        )


class SpoolingReaders(Readers):
    """Readers of files and of packed files, which are unpacked into a temporary file in `directory`."""

    def __init__(self, options: Options | None = None, directory: str = "") -> None:
        super().__init__(options)
        self._directory, self._process = directory, os.getpid()
        self._spool: Spool | None = None
        self._contents: Any = None
        # Bytes that will be read of each packed file.
        self.expected: Mapping[File, int] = {}

    @property
    def spool(self) -> Spool:
        """The temporary file of this process."""
        if self._spool is None or self._process != os.getpid():
            from ckptconv.storage.spool import Spool

            self._spool, self._process = Spool(self._directory), os.getpid()
        return self._spool

    @property
    def bytes_unpacked(self) -> int:
        """How many packed bytes were read, since `unpacked` was asked last."""
        nbytes: int = self._contents.nbytes if self._contents else 0
        return nbytes

    def expect(self, reading: Mapping[File, int]) -> None:
        """Announce how many bytes of each packed file will be read. Raises UnsupportedError if nothing unpacks them,
        FailedError if the largest has no room."""
        if reading:
            unpacking(next(iter(reading)).path)
        self.expected = reading
        size = max((file.size for file in reading), default=0)
        if size:
            self.spool.check_space(size)

    def open(self, file: File) -> Reader:
        if file.packed is None:
            return super().open(file)
        # `reading`, which opens files, does so in one thread at a time.
        if self._contents is None:
            self._contents = unpacking(file.path).Contents(self)
        reader: Reader = self._contents.reader_of(file)
        return reader

    def unpacked(self) -> int:
        nbytes = self.bytes_unpacked
        if nbytes:
            self._contents.nbytes = 0
        return nbytes

    def __enter__(self) -> SpoolingReaders:
        return self

    def close(self) -> None:
        if self._contents:
            self._contents.close()
        super().close()
        if self._spool:
            self.spool.close()
