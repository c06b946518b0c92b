"""Write a report to a file, which gets its name only when it is complete."""

from __future__ import annotations

from collections.abc import Iterable

from ckptconv.errors import UNWRITTEN, UsageError, leaving
from ckptconv.options.table import Options
from ckptconv.publish.replacing import Replacing, Spared
from ckptconv.publish.staging.local import LocalStaging
from ckptconv.storage.paths import is_remote, normalize

# A file with a command's report: its option, and its kind, as `publish.earlier` names it.
PAGE = ("--html", "page")


@leaving(UNWRITTEN)
def check_whole(target: str, output: tuple[str, str], overwrite: bool, read: Iterable[str] = ()) -> None:
    """Raise UsageError if `target` cannot be a local file, or if it would replace a protected one, such as the files
    that are `read`. Call it before long work too. `output` is as `PAGE`."""
    option, kind = output
    if is_remote(normalize(target)):
        raise UsageError(f"{option} {target}: it must be a local file.")
    Replacing(Options(overwrite=overwrite), Spared(read), [], {option: (normalize(target), kind)}).check()


@leaving(UNWRITTEN)
def write_whole(target: str, data: bytes, output: tuple[str, str], overwrite: bool, read: Iterable[str]) -> None:
    """Write `data` to the local file `target`. Raise the errors of `check_whole`, and FailedError if it cannot be
    written."""
    check_whole(target, output, overwrite, read)
    with LocalStaging(normalize(target), output[1], durable=False) as staging:
        staging.made_as = output[1]
        staging.seal(staging.put("", data))
        staging.commit([""])
