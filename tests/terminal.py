"""What a program shows on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import struct
import termios
from fcntl import ioctl

from prepared import PROGRAM, prepared


def shown_on(master: int) -> str:
    """What is written to a pseudo-terminal, by its controlling side, until the last that has it open has ended."""
    shown = b""
    # Linux reports the end as an error.
    with contextlib.suppress(OSError):
        while data := os.read(master, 1 << 16):
            shown += data
    os.close(master)
    return shown.decode()


def on_terminal(columns: int, *arguments: object, **environment: str) -> str:
    """What the command shows on a terminal of so many columns."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    environment = {**clean, "TERM": "xterm-256color", **environment}
    process = prepared().python(PROGRAM, *arguments, stdout=slave, env=environment)
    os.close(slave)
    shown = shown_on(master)
    assert process.wait() == 0, process.communicate()
    return shown
