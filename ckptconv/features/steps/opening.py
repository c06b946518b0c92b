"""The last good step of a run in the place of the run: what `--last-good` opens, and advice where a run is torn."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import AGAIN, CkptconvError, CorruptError
from ckptconv.features.runs.run import run_at
from ckptconv.features.runs.whole import Judged, judged, newest_good
from ckptconv.formats.source import Source
from ckptconv.storage.location import Location
from ckptconv.storage.paths import normalize
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
    """Add to the error of converting the run at `path` which step is the last good one, if the newest is not."""
    if options.get("last_good"):
        return
    with contextlib.suppress(CkptconvError):
        steps = _judged_at(path, options)
        last = newest_good(steps)
        if last is not None and last is not steps[-1]:
            good = f"The last good step of the run is {last.step.path}. To convert it, use --last-good."
            hint = error.hint.replace(AGAIN, f"Copy or download {steps[-1].step.path} again.")
            error.hint = f"{good} {hint}".rstrip()  # the other may end in a command


def _judged_at(path: str, reaching: Mapping[str, Any]) -> list[Judged]:
    stores = dict(reaching.get("storage_options") or {})
    place = Location(pinned(normalize(path), stores), stores)
    return judged(run_at(place), inert=reaching.get("inert", False))
