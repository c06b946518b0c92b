"""What a program shows on a terminal."""

from __future__ import annotations

import contextlib
import os


def shown_on(master: int) -> str:
    """What is written to a pseudo-terminal, by its controlling side, until the last that has it open has ended."""
    shown = b""
    # Linux reports the end as an error.
    with contextlib.suppress(OSError):
        while data := os.read(master, 1 << 16):
            shown += data
    os.close(master)
    return shown.decode()
