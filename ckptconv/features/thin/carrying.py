"""Does what was decided: each step is removed, or replaced by less of it, the oldest first.

`removal` sees to it that a step is at any time as it was, or as it is to be. A run that was killed is finished by the
next one.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ckptconv.errors import DifferenceError, FailedError, UnsafeError, UnsupportedError
from ckptconv.features.removal.area import LESSEN, REMOVE, Area, entered
from ckptconv.features.removal.leaving import recover, remove, replace
from ckptconv.features.runs.run import Step
from ckptconv.features.runs.whole import Judged, newest_good
from ckptconv.features.thin.planning import Planned, Thinning
from ckptconv.formats.registered import DESCRIBING
from ckptconv.storage.handles import Handle
from ckptconv.storage.location import Location
from ckptconv.storage.strict_json import MOST
from ckptconv.text import reason

_LEFT = "The steps that were left were not touched."


def carry_out(
    path: str,
    plan: Callable[[], Thinning],
    options: Mapping[str, Any],
    stores: Mapping[str, Any],
    on_done: Callable[[str, str], object],
) -> tuple[Thinning, str]:
    """Do what `plan` says is to be done with the steps in the directory at `path`, the oldest step first; `on_done` is
    called with each step and what became of it. Return what was planned, and the step that an earlier run had begun,
    and that was finished before; "" if there was none.

    No other run plans or does anything meanwhile. Raise UnsafeError for a step that is not what it was when it was
    looked at, also for one that stays and that others need: then all that are left stay.
    """
    reaching = {"storage_options": dict(stores), "inert": options.get("inert", False)}
    with entered(path) as area:
        try:
            recovered = recover(area)
        except OSError as error:
            raise FailedError(f"{area.path}: what an earlier run began cannot be finished: {reason(error)}.") from error
        thinning = plan()
        if (thinning.run.place.path or ".") != path:
            raise UnsafeError(
                f"The steps are in {thinning.run.place.path} now, and were in {path}. Nothing was changed."
            )
        last = newest_good([planned.judged for planned in thinning.steps])
        for planned in thinning.of(REMOVE, LESSEN):
            step = planned.judged.step
            try:
                if last:
                    _check_stays(area, last.step)
                if planned.action == REMOVE:
                    remove(area, step.name, step.names, step.files)
                else:
                    write = functools.partial(_write_lesser, area, planned, options["as_"], reaching)
                    replace(area, step.name, step.files, write)
            except OSError as error:
                raise FailedError(f"{step.name} could not be thinned: {reason(error)}.") from error
            on_done(step.name, planned.action)
    return thinning, recovered


def _check_stays(area: Area, step: Step) -> None:
    """Raise UnsafeError unless a step that is to stay has the files that were looked at."""
    for path, entry in step.files.items():
        try:
            now = os.stat(path, dir_fd=area.home.fd)
        except OSError as error:
            raise UnsafeError(f"{step.path} is to stay, and {path} is not there: {reason(error)}. {_LEFT}") from error
        if entry.kind == "file" and (now.st_size, now.st_mtime) != (entry.file.size, entry.time):
            raise UnsafeError(f"{step.path} is to stay, and {path} has changed since it was looked at. {_LEFT}")


def _write_lesser(area: Area, planned: Planned, dtype: Any, reaching: Mapping[str, Any], new: str) -> None:
    """Write less of a step to the directory `new` in the area, and compare it with the step."""
    from ckptconv.conversion import convert

    if planned.base:
        _write_delta(area, planned.judged, planned.base, new, reaching)
        _check_stays(area, planned.base.step)
    else:
        convert(planned.judged.path, os.path.join(area.path, new), dtype=dtype or "keep", verify=True, **reaching)
    with area.inside.inside(new) as lesser:
        _dated(lesser, planned.judged.step.time)


def _write_delta(area: Area, judged: Judged, base: Judged, new: str, reaching: Mapping[str, Any]) -> None:
    """Write what changes `base` into a step to the directory `new` in the area, with a virtual checkpoint of both, and
    compare that with the step. Raise UnsupportedError if this program has no deltas."""
    diff, patch = (getattr(import_module("ckptconv"), name, None) for name in ("diff", "patch"))
    if not (diff and patch and DESCRIBING):
        raise UnsupportedError("--as delta needs deltas, which were left out of this program.")
    suffix, reader = next(iter(DESCRIBING.items()))
    place, name = os.path.join(area.path, new), f"model{suffix}"
    delta, whole = os.path.join(place, "delta"), os.path.join(place, name)
    os.mkdir(place, 0o777)
    diff(base.path, judged.path, measure=False, delta=delta, **reaching)
    with Handle.open(delta) as written:
        _dated(written, judged.step.time)
    patch(os.path.realpath(base.path), delta, whole, **reaching)
    if not diff(judged.path, whole, measure=False, **reaching).equal:
        raise DifferenceError(f"{whole} is not {judged.path}, of which it is to take the place.")
    # A run that is moved keeps its bases.
    home = area.home.path
    with Handle.open(place) as written:
        text = Location(whole).read_text(MOST)
        bound = import_module(reader).bound(text, os.path.join(home, judged.step.name), home)
        written.write_whole(name, bound.encode())
        written.sync_file(name)


def _dated(place: Handle, when: float | None) -> None:
    """Give the files in a directory the time of the step that they were made of: policies go by it."""
    for name in place.names() if when is not None else ():
        if when is not None and stat.S_ISREG(place.stat(name).st_mode):
            os.utime(name, (when, when), dir_fd=place.fd, follow_symlinks=False)
