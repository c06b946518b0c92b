"""Write what was found to a file, which gets its name only when it is complete."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ckptconv.errors import UNWRITTEN, UsageError, leaving
from ckptconv.outputs.targets import Spared, check_file
from ckptconv.publish.staging.local import LocalStaging
from ckptconv.storage.paths import is_remote, normalize


@leaving(UNWRITTEN)
def check_whole(target: str, called: str) -> None:
    """Raise UsageError if `target` cannot be a local file. Call it before long work; messages say `called`."""
    if is_remote(target):
        raise UsageError(f"{target}: {called} is written to a local file.")
    check_file(normalize(target), f"{called[:1].upper()}{called[1:]}", {})


@leaving(UNWRITTEN)
def write_whole(target: str, data: bytes, called: str, read: Iterable[str]) -> None:
    """Write `data`, which messages call `called` ("the page"), to the local file `target`.

    `read` are files that it may not replace. Raises UsageError if `target` cannot be such a file, FailedError if it
    cannot be written.
    """
    check_whole(target, called)
    target = normalize(target)
    Spared(list(read)).check(target, called[:1].upper() + called[1:])
    with LocalStaging(target, called.rpartition(" ")[2], durable=False) as staging:
        staging.seal(staging.put(os.path.basename(target), data))
        staging.commit([os.path.basename(target)])
