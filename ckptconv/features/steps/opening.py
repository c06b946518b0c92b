"""The last good step of a run in the place of the run: what `--last-good` opens, and advice where a run is torn."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import AGAIN, CkptconvError, CorruptError, UsageError
from ckptconv.features.runs.run import run_at
from ckptconv.features.runs.whole import Judged, judged, newest_good
from ckptconv.formats.source import Source
from ckptconv.storage.location import Location
from ckptconv.storage.paths import dirname, is_remote, is_same, normalize
from ckptconv.storage.stores import pinned


def placed(path: str, asked: Mapping[str, Any], reaching: Mapping[str, Any]) -> str:
    """Return the path of the last good step of the run at `path`, or of its file with the weights. Raise UsageError if
    it has no steps, CorruptError if none is good."""
    last = newest_good(_judged_at(path, reaching))
    if last is None:
        raise CorruptError(f"No step of {path} is good.", f"`ckptconv steps {path}` shows why.")
    is_file = last.path in (entry.file.path for entry in last.step.files.values())
    return last.path if is_file else last.step.path


def warned(sources: list[Source]) -> list[Source]:
    """Return `sources`, the first with a note that names the step."""
    first, *others = sources
    return [
        first._replace(notes=[f"Took {first.path}, the last good step by its sizes and markers.", *first.notes]),
        *others,
    ]


def advise(error: CkptconvError, path: str, options: Mapping[str, Any]) -> None:
    """Add to an error about the checkpoint at `path`, a run or a step of one, which step is the last good one, if that
    is another than the one that was opened."""
    is_about = isinstance(error, CorruptError) or error.message.startswith(f"{normalize(path)} ")
    if options.get("last_good") or not is_about:
        return
    with contextlib.suppress(CkptconvError):
        steps, opened = _judged_around(path, options)
        last = newest_good(steps)
        if not opened or last is None or last.step.path == opened:
            return
        good = f"The last good step of the run is {last.step.path}."
        is_run = not is_same(opened, path)
        hint = error.hint.replace(AGAIN, f"Copy or download {opened} again.")
        hint = "" if hint.endswith(f": {dirname(opened)}") else hint  # which is where the run has its steps
        good += " To convert it, use convert --last-good." if is_run else ""
        error.hint = f"{good} {hint}".rstrip()  # it may end in a command


def _judged_around(path: str, reaching: Mapping[str, Any]) -> tuple[list[Judged], str]:
    """Return the steps of the run at `path`, and the path of the newest; or those of the run that has it as a step."""
    try:
        steps = _judged_at(path, reaching)
    except UsageError:
        if is_remote(path):
            raise
        steps = _judged_at(dirname(normalize(path)), reaching)
        return steps, next((known.step.path for known in steps if is_same(known.step.path, path)), "")
    return steps, steps[-1].step.path


def _judged_at(path: str, reaching: Mapping[str, Any]) -> list[Judged]:
    stores = dict(reaching.get("storage_options") or {})
    place = Location(pinned(normalize(path), stores), stores)
    return judged(run_at(place), inert=reaching.get("inert", False))
