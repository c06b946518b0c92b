"""Readers of files, and of packed files such as compressed records of archives. What unpacks these is imported when one
is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptconv.errors import LimitError
from ckptconv.storage.files import Readers
from ckptconv.storage.reading import Options, Reader
from ckptconv.tensors.moves import File

if TYPE_CHECKING:
    from ckptconv.storage.spool import Spool
    from ckptconv.storage.unpacking import Contents

# A byte of deflate stands for at most 1,032 bytes: two bits for 258.
MAX_RATIO = 1032


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
        self._directory = directory
        self._spool: Spool | None = None
        self._expected: Mapping[File, int] = {}
        self._contents: Contents | None = None
        self._process = os.getpid()

    @property
    def spool(self) -> Spool:
        """The temporary file."""
        if self._contents:
            return self._contents.spool
        if self._spool is None:
            from ckptconv.storage.spool import Spool

            self._spool = Spool(self._directory)
        return self._spool

    @property
    def bytes_unpacked(self) -> int:
        """How many packed bytes were read, since `unpacked` was asked last."""
        return self._contents.nbytes if self._contents else 0

    def expect(self, reading: Mapping[File, int]) -> None:
        """Announce how many bytes of each packed file will be read. Raises FailedError if the largest has no room."""
        self._expected = reading
        if self._contents:
            self._contents.expected = reading
        size = max((file.size for file in reading), default=0)
        if size:
            self.spool.check_space(size)

    def open(self, file: File) -> Reader:
        if file.packed is None:
            return super().open(file)
        from ckptconv.storage.unpacking import Contents, PackedReader

        # `reading`, which opens files, does so in one thread at a time.
        self._contents = self._contents or Contents(self, self.spool, self._expected, self._process)
        return PackedReader(file, self._contents)

    def unpacked(self) -> int:
        if self._contents is None:
            return 0
        nbytes, self._contents.nbytes = self._contents.nbytes, 0
        return nbytes

    def __enter__(self) -> SpoolingReaders:
        return self

    def close(self) -> None:
        if self._contents:
            self._contents.close()
        super().close()
        if self._spool:
            self.spool.close()
