"""Handle SIGINT and SIGTERM: each ends the work with one sentence and one exit code, whenever and however often it
comes.

Before the work begins, a signal ends the process at once. After that, the first signal raises StoppedError, so that the
work is cleaned up. Later ones do not disturb the cleanup, unless it takes more than `PATIENCE` seconds: then they end
the process. While outputs get their final names, signals are ignored: after exit code 143, nothing new is published.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
# Seconds of cleaning up after which another signal ends the process.
PATIENCE = 5.0
# Numbers of the signals that came since `hold`.
_held: list[int] = []
_NOTHING = "No output was published."


def leave_at_once() -> None:
    """Let a signal end the process, until `raise_stopped` is called. Imports nothing, as it runs before large
    imports."""
    handle(_leave)


def raise_stopped() -> None:
    """From now on, the first signal raises StoppedError in the main thread."""
    sys.unraisablehook = _not_lost
    handle(stop)


def hold() -> None:
    """From now on, note signals, and let them raise nothing until `release`."""
    handle(lambda number, frame: _held.append(number))


def held() -> bool:
    """Return whether a signal came since `hold`."""
    return bool(_held)


def release() -> None:
    """End `hold`: raise StoppedError if a signal came, and for the next one."""
    handle(stop)
    if _held:
        number = _held[0]
        _held.clear()
        stop(number, None)


def ignore() -> None:
    """From now on, ignore signals."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def handle(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in _NUMBERS:
        # The parent process may have set a signal to be ignored, as shells do for jobs in the background.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    message = f"Stopped by {signal.Signals(number).name}. {_NOTHING}"
    code = 128 + number
    if "--json" in sys.argv:
        # The command line is not parsed yet, so nothing else is known.
        _write(1, '{"version": 1, "ok": false, "command": null, "input": null, "error": ')
        _write(1, f'{{"exit_code": {code}, "kind": "interrupted", "message": "{message}", "hint": ""}}}}\n')
    _write(2, f"ckptconv: {message}\n")
    os._exit(code)


def _write(number: int, text: str) -> None:
    # Imports nothing: a signal may come in the middle of any import.
    try:  # noqa: SIM105
        os.write(number, text.encode())
    except OSError:  # the stream is closed
        pass


def stop(number: int, frame: FrameType | None) -> NoReturn:
    import time

    from ckptconv.errors import StoppedError

    stopped = time.monotonic()

    def again(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - stopped > PATIENCE:
            os._exit(128 + number)

    handle(again)
    raise StoppedError(f"Stopped by {signal.Signals(number).name}. {_NOTHING}", exit_code=128 + number)


def _not_lost(lost: sys.UnraisableHookArgs) -> None:
    """Send a signal again that came where Python drops exceptions, such as in a finalizer."""
    import threading

    from ckptconv.errors import StoppedError

    error = lost.exc_value
    if isinstance(error, StoppedError):
        handle(stop)
        again = threading.Timer(0.01, os.kill, (os.getpid(), error.exit_code - 128))
        again.daemon = True
        again.start()
    # Python reports this for a signal that comes while the process begins to ignore it.
    elif not (isinstance(error, OSError) and "ignored due to race condition" in str(error)):
        sys.__unraisablehook__(lost)
