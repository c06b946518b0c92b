"""Write what was found to a file, which gets its name only when it is complete."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ckptconv.errors import UsageError
from ckptconv.outputs.targets import Spared
from ckptconv.publish.staging.local import LocalStaging
from ckptconv.storage.files import look
from ckptconv.storage.paths import dirname, is_remote, normalize


def write_whole(target: str, data: bytes, called: str, read: Iterable[str]) -> None:
    """Write `data`, which messages call `called` ("the page"), to the local file `target`.

    `read` are files that it may not replace. Raises UsageError if `target` cannot be such a file, FailedError if it
    cannot be written.
    """
    target = normalize(target)
    if is_remote(target):
        raise UsageError(f"{target}: {called} is written to a local file.")
    kind = look(target).kind
    if kind not in ("file", "missing"):
        raise UsageError(f"{target} is {look(target).described}, where {called} was to be written.")
    Spared(list(read)).check(target, called[:1].upper() + called[1:])
    if look(dirname(target)).kind != "directory":
        raise UsageError(f"{target} cannot be written: there is no directory {dirname(target)}.", "Make it first.")
    with LocalStaging(target, called.rpartition(" ")[2], durable=False) as staging:
        staging.seal(staging.put(os.path.basename(target), data))
        staging.commit([os.path.basename(target)])
