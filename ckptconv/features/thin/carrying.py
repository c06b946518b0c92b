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

from ckptconv.errors import DifferenceError, FailedError, UnsupportedError
from ckptconv.features.removal.area import LESSEN, REMOVE, Area, entered
from ckptconv.features.removal.leaving import recover, remove, replace
from ckptconv.features.runs.whole import Judged
from ckptconv.features.thin.planning import Planned, Thinning
from ckptconv.formats.registered import DESCRIBING
from ckptconv.storage.handles import Handle
from ckptconv.storage.location import Location
from ckptconv.storage.strict_json import MOST
from ckptconv.text import reason


def carry_out(
    thinning: Thinning, options: Mapping[str, Any], stores: Mapping[str, Any], on_done: Callable[[str, str], object]
) -> list[str]:
    """Do what was planned, the oldest step first; `on_done` is called with each step and what became of it. Return the
    steps that an earlier run had begun, and that were finished now.

    Raise UnsafeError for a step that is not what it was when it was looked at: then it, and all later ones, stay.
    """
    reaching = {"storage_options": dict(stores), "inert": options.get("inert", False)}
    with entered(thinning.run.place.path or ".") as area:
        try:
            recovered = recover(area)
        except OSError as error:
            raise FailedError(f"{area.path}: what an earlier run began cannot be finished: {reason(error)}.") from error
        for planned in thinning.of(REMOVE, LESSEN):
            step = planned.judged.step
            if step.name == recovered:
                continue
            try:
                if planned.action == REMOVE:
                    remove(area, step.name, step.names, step.files)
                else:
                    write = functools.partial(_write_lesser, area, planned, options["as_"], reaching)
                    replace(area, step.name, step.files, write)
            except OSError as error:
                raise FailedError(f"{step.name} could not be thinned: {reason(error)}.") from error
            on_done(step.name, planned.action)
    return [recovered] if recovered else []


def _write_lesser(area: Area, planned: Planned, dtype: Any, reaching: Mapping[str, Any], new: str) -> None:
    """Write less of a step to the directory `new` in the area, and compare it with the step."""
    from ckptconv.conversion import convert

    if planned.base:
        _write_delta(area, planned.judged, planned.base, new, reaching)
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
