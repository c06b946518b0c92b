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
from ckptconv.features.steps.run import Step
from ckptconv.features.steps.whole import Judged
from ckptconv.features.thin.area import Area, agrees, entered, entries_of, mark_of
from ckptconv.features.thin.planning import LESSEN, REMOVE, Planned, Thinning
from ckptconv.formats.registered import DESCRIBING
from ckptconv.storage.handles import Handle
from ckptconv.storage.location import Location
from ckptconv.storage.strict_json import MOST
from ckptconv.text import reason

# What the journal says of a step: that all its names are out of the run; that less of it has its name; that nothing of
# it is hidden any more.
_MOVED, _SWAPPED, _CLEARED = "moved", "swapped", "cleared"


def carry_out(
    thinning: Thinning, options: Mapping[str, Any], stores: Mapping[str, Any], told: Callable[[str, str], object]
) -> list[str]:
    """Do what was planned, the oldest step first; `told` is called with each step and what became of it. Return the
    steps that an earlier run had begun, and that were finished now.

    Raise UnsafeError for a step that is not what it was when it was looked at: then it, and all later ones, stay.
    """
    with entered(thinning.run.place.path or ".") as area:
        finished = recover(area)
        for number, each in enumerate(thinning.of(REMOVE, LESSEN)):
            if each.judged.step.name in finished:
                continue
            try:
                (_remove if each.action == REMOVE else _lessen)(area, each, number, options, stores)
            except OSError as error:
                raise FailedError(f"{each.judged.step.name} could not be thinned: {reason(error)}.") from error
            told(each.judged.step.name, each.action)
    return finished


def recover(area: Area) -> list[str]:
    """Finish what a run that was killed had begun. Return the steps that are as they were to be. A step of which
    nothing was moved is as it was."""
    begun: dict[str, dict[str, Any]] = {}
    states: dict[str, str] = {}
    for line in area.journal():
        step = str(line.get("step"))
        if "do" in line:
            begun[step] = line
            states.pop(step, None)
        else:
            states[step] = str(line.get("state"))
    finished = []
    for step, line in begun.items():
        if states.get(step) == _CLEARED:
            continue
        is_done = _recover_removal(area, line, states.get(step, ""))
        if line["do"] == LESSEN:
            is_done = _recover_lesser(area, line)
        area.note(step=step, state=_CLEARED)
        if is_done:
            finished.append(step)
    return finished


def _recover_removal(area: Area, line: Mapping[str, Any], state: str) -> bool:
    moves: Mapping[str, str] = line.get("moves", {})
    marks: Mapping[str, str] = line.get("marks", {})
    if line["do"] != REMOVE or not any(map(area.inside.has, moves.values())):
        return state == _MOVED
    for name, into in moves.items():
        if state == _MOVED:
            continue
        if area.inside.has(into):
            if not _is_marked(area.inside, into, marks[name]):
                raise UnsafeError(f"{area.path}/{into}, which was {name}, has changed since. It was left alone.")
        elif area.home.has(name):
            area.take(name, marks[name], into)
    if state != _MOVED:
        area.note(step=line["step"], state=_MOVED)
    for into in moves.values():
        area.remove(into)
    return True


def _recover_lesser(area: Area, line: Mapping[str, Any]) -> bool:
    """Return whether less of a step had its name already. Whichever of the two is hidden is not needed."""
    new, name = line["new"], line["step"]
    area.finish_swap(name, new)
    is_done = area.inside.has(new) and _is_marked(area.inside, new, line["mark"])
    is_done = is_done or not _is_marked(area.home, name, line["mark"])
    area.remove(new)
    return is_done


def _is_marked(home: Handle, name: str, mark: str) -> bool:
    with contextlib.suppress(OSError, UnsafeError):
        return mark_of(entries_of(home, name)) == mark
    return False


def _marks(area: Area, step: Step) -> dict[str, str]:
    """Return the marks of the names of a step. Raise UnsafeError if it has other files than when it was judged."""
    try:
        found = {name: entries_of(area.home, name) for name in step.names}
    except FileNotFoundError as error:
        raise UnsafeError(f"{step.path} is not there any more.") from error
    if not agrees({path: each for entries in found.values() for path, each in entries.items()}, step.files):
        raise UnsafeError(f"{step.path} has changed since it was looked at. It was left alone.")
    return {name: mark_of(entries) for name, entries in found.items()}


def _remove(area: Area, each: Planned, number: int, options: Mapping[str, Any], stores: Mapping[str, Any]) -> None:
    step = each.judged.step
    marks = _marks(area, step)
    moves = {name: f"gone-{number}-{at}" for at, name in enumerate(marks)}
    area.note(step=step.name, do=REMOVE, moves=moves, marks=marks)
    for name, into in moves.items():
        area.take(name, marks[name], into)
    area.note(step=step.name, state=_MOVED)
    for into in moves.values():
        area.remove(into)
    area.note(step=step.name, state=_CLEARED)


def _lessen(area: Area, each: Planned, number: int, options: Mapping[str, Any], stores: Mapping[str, Any]) -> None:
    from ckptconv.conversion import convert

    step = each.judged.step
    mark = _marks(area, step)[step.name]
    new = f"new-{number}"
    area.note(step=step.name, do=LESSEN, new=new, mark=mark)
    reaching = {"storage_options": dict(stores), "inert": options.get("inert", False)}
    try:
        if each.base:
            _write_delta(area, each.judged, each.base, new, reaching)
        else:
            place = os.path.join(area.path, new)
            convert(each.judged.path, place, dtype=options["as_"] or "keep", verify=True, **reaching)
        with area.inside.inside(new) as made:
            _dated(made, step.time)
    except BaseException:
        area.remove(new)
        area.note(step=step.name, state=_CLEARED)
        raise
    area.swap(step.name, mark, new)
    area.note(step=step.name, state=_SWAPPED)
    area.remove(new)
    area.note(step=step.name, state=_CLEARED)


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
    with Handle.open(delta) as made:
        _dated(made, judged.step.time)
    patch(os.path.realpath(base.path), delta, whole, **reaching)
    if not diff(judged.path, whole, measure=False, **reaching).equal:
        raise DifferenceError(f"{whole} is not {judged.path}, of which it is to take the place.")
    # A run that is moved keeps its bases.
    home = area.home.path
    with Handle.open(place) as made:
        text = Location(whole).read_text(MOST)
        made.write_whole(name, import_module(reader).bound(text, os.path.join(home, judged.step.name), home).encode())
        made.sync_file(name)


def _dated(place: Handle, when: float | None) -> None:
    """Give the files in a directory the time of the step that they were made of: policies go by it."""
    for name in place.names() if when is not None else ():
        if when is not None and stat.S_ISREG(place.stat(name).st_mode):
            os.utime(name, (when, when), dir_fd=place.fd, follow_symlinks=False)
