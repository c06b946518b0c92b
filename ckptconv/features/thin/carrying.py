"""Does what was decided: each step is removed, or replaced by less of it, and the journal says how far that is.

A step leaves the run by one rename, and what is less of it takes its place by one exchange. Until then the step is as
it was, from then on as it is to be; what remains to be done is to remove what is hidden. A run that was killed is
finished by the next one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ckptconv.errors import DifferenceError, FailedError, UnsafeError, UnsupportedError
from ckptconv.features.steps.whole import Judged
from ckptconv.features.thin.area import (
    CLEARED,
    DONE,
    LESSEN,
    REMOVE,
    Area,
    Begun,
    agrees,
    entered,
    entries_of,
    hidden_name,
    mark_of,
)
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
    with entered(thinning.run.place.path or ".") as area:
        finished = recover(area)
        for number, planned in enumerate(thinning.of(REMOVE, LESSEN)):
            name = planned.judged.step.name
            if name in finished:
                continue
            try:
                begun = _begun(area, planned, number)
                area.begin(begun)
                if planned.action == REMOVE:
                    _remove(area, begun)
                else:
                    _lessen(area, begun, planned, options, stores)
                area.note(name, CLEARED)
            except OSError as error:
                raise FailedError(f"{name} could not be thinned: {reason(error)}.") from error
            on_done(name, planned.action)
    return finished


def recover(area: Area) -> list[str]:
    """Finish what a run that was killed had begun. Return the steps that are as they were to be. A step of which
    nothing was moved is as it was."""
    finished = []
    for begun, is_done in area.unfinished():
        is_moved = is_done or any(map(area.inside.has, begun.moves.values()))
        if begun.do == REMOVE and is_moved:
            _remove(area, begun, is_done)
        elif begun.do == LESSEN:
            is_moved = _finish_lesser(area, begun, is_done)
        area.note(begun.step, CLEARED)
        if is_moved:
            finished.append(begun.step)
    return finished


def _begun(area: Area, planned: Planned, number: int) -> Begun:
    """Return what is to be done with a step. Raise UnsafeError if it has other files than when it was judged."""
    step = planned.judged.step
    try:
        names = {name: entries_of(area.home, name) for name in step.names}
    except FileNotFoundError as error:
        raise UnsafeError(f"{step.path} is not there any more.") from error
    if not agrees({path: entry for entries in names.values() for path, entry in entries.items()}, step.files):
        raise UnsafeError(f"{step.path} has changed since it was looked at. It was left alone.")
    moves = {name: hidden_name(number, part) for part, name in enumerate(names)}
    return Begun(step.name, planned.action, moves, {name: mark_of(entries) for name, entries in names.items()})


def _remove(area: Area, begun: Begun, is_done: bool = False) -> None:
    """Remove a step: those of its names that are left in the run, unless it `is_done`, and what is hidden."""
    if not is_done:
        for name, hidden in begun.moves.items():
            if area.inside.has(hidden):
                area.check(hidden, begun.marks[name])
            elif area.home.has(name):
                area.take(name, begun.marks[name], hidden)
        area.note(begun.step, DONE)
    for hidden in begun.moves.values():
        area.remove(hidden)


def _lessen(area: Area, begun: Begun, planned: Planned, options: Mapping[str, Any], stores: Mapping[str, Any]) -> None:
    """Replace a step by less of it, which is written beside, and compared with the step."""
    from ckptconv.conversion import convert

    step, new = planned.judged.step, begun.moves[begun.step]
    reaching = {"storage_options": dict(stores), "inert": options.get("inert", False)}
    try:
        if planned.base:
            _write_delta(area, planned.judged, planned.base, new, reaching)
        else:
            place = os.path.join(area.path, new)
            convert(planned.judged.path, place, dtype=options["as_"] or "keep", verify=True, **reaching)
        with area.inside.inside(new) as lesser:
            _dated(lesser, step.time)
    except BaseException:
        area.remove(new)
        area.note(step.name, CLEARED)
        raise
    area.swap(step.name, begun.marks[step.name], new)
    area.note(step.name, DONE)
    area.remove(new)


def _finish_lesser(area: Area, begun: Begun, is_done: bool) -> bool:
    """Return whether less of a step has its name. Whichever of the two is hidden is not needed."""
    hidden = begun.moves[begun.step]
    area.finish_swap(begun.step, hidden)
    with contextlib.suppress(UnsafeError):
        area.check(hidden, begun.marks[begun.step])
        is_done = True
    area.remove(hidden)
    return is_done


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
