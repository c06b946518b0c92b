"""Keep input from a pipe, which can be read only once, in a temporary file, which is read at any offset."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ckptconv.errors import CorruptError, FailedError, UsageError
from ckptconv.features.spool.spool import Spool
from ckptconv.storage.files import hold
from ckptconv.storage.paths import STANDARD_INPUT, STANDARD_INPUT_NAME
from ckptconv.text import reason

# Bytes that are read at a time.
_CHUNK = 1 << 17


def take_pipe(path: str, directory: str = "") -> str:
    """Read a pipe to its end, into a temporary file. Return the name that it can be read under.

    Standard input that is a file is read in place. Raises UsageError for a terminal, and CorruptError if nothing comes.
    """
    name = STANDARD_INPUT_NAME if path == STANDARD_INPUT else path
    try:
        source = os.dup(0) if path == STANDARD_INPUT else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FailedError(f"{name} cannot be read: {reason(error)}.") from error
    if _is_at_start_of_file(source):
        hold(name, source)
        return name
    try:
        if os.isatty(source):
            raise UsageError(
                "Standard input is a terminal, but a checkpoint was expected.", "Pipe one in: cat x.pt | ckptconv …"
            )
        spool = Spool(directory)
        chunk = None
        for chunk in _chunks_of(source, name):
            spool.write_at(spool.room(len(chunk)), chunk)
        if chunk is None:
            mode = os.fstat(source).st_mode
            subject = f"the pipe {name}" if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else name
            raise CorruptError(
                f"{subject} is empty.",
                "Check the output of the command before the pipe. With `set -o pipefail`, the shell reports its "
                "failure.",
            )
        hold(name, spool.descriptor)
    finally:
        os.close(source)
    return name


def _is_at_start_of_file(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode) and os.lseek(fd, 0, os.SEEK_CUR) == 0


def _chunks_of(fd: int, name: str) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_CHUNK))
    try:
        while count := os.readv(fd, [buffer]):
            yield buffer[:count]
    except OSError as error:
        raise FailedError(f"{name} cannot be read: {reason(error)}.") from error
