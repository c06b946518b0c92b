"""Removes steps, or replaces them by less of them, so that each is at any time as it was, or as it is to be.

A step leaves its directory by one rename, and what is less of it takes its place by one exchange. What remains to be
done then is to remove what is hidden. `recover` finishes what was interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from ckptconv.errors import UnsafeError
from ckptconv.features.removal.area import ADVICE, LESSEN, REMOVE, Area, Change, check, hidden_name
from ckptconv.features.removal.entries import agrees, entries_of, is_entry, mark_of
from ckptconv.storage.reading import Entry


def remove(area: Area, step: str, names: Sequence[str], seen: Mapping[str, Entry]) -> None:
    """Remove the entries `names`, which are a step, with all in them. Raise UnsafeError if the files in them are not
    those that were `seen`."""
    change = _change(area, REMOVE, step, names, seen)
    area.begin(change)
    _remove(area, change)


def replace(area: Area, step: str, seen: Mapping[str, Entry], write: Callable[[str], None]) -> None:
    """Replace the entry `step` by what `write` makes under the name in the area that it is given. Raise UnsafeError if
    the files in the entry are not those that were `seen`."""
    change = _change(area, LESSEN, step, [step], seen)
    hidden, mark = change.moves[step], change.marks[step]
    area.begin(change)
    try:
        write(hidden)
        with area.inside.inside(hidden) as new:
            new.sync_below()
        check(area.home, step, mark)
    except BaseException:
        area.remove(hidden)
        area.clear()
        raise
    area.swap(step, mark, hidden)
    _finish(area, change)


def recover(area: Area) -> str:
    """Finish the change that was interrupted, if less of a step has its name, or all of one is in the area; else, undo
    it. Return the step that is as it was to be; "" if there is none. Raise UnsafeError if something else has a name in
    the directory by now, or if what is in the area is not what was moved there."""
    under_way = area.under_way()
    if under_way is None:
        return ""
    change, is_done = under_way
    if is_done or (change.do == LESSEN and _is_exchanged(area, change)):
        _finish(area, change)
        return change.step
    if change.do == REMOVE:
        area.give_back(change.moves)
    else:
        area.remove(change.moves[change.step])
    area.clear()
    return ""


def _is_exchanged(area: Area, change: Change) -> bool:
    """Return whether the reduced step has the step's name, after finishing an exchange that was cut short; if not, it
    is hidden. Raise UnsafeError if the step has no name, or if it was changed after the exchange."""
    step, hidden = change.step, change.moves[change.step]
    area.finish_swap(step, hidden)
    if area.inside.has(hidden) and not area.home.has(step):
        raise UnsafeError(f"{area.home.path}/{step} does not exist: {area.path}/{hidden} was left in place.", ADVICE)
    is_exchanged = is_entry(area.inside, hidden, change.marks[step])
    if is_exchanged:
        check(area.inside, hidden, change.marks[step])
    return is_exchanged


def _change(area: Area, do: str, step: str, names: Sequence[str], seen: Mapping[str, Entry]) -> Change:
    """Return the change of a step. Raise UnsafeError if it has other files than were `seen`."""
    path = os.path.join(area.home.path, step)
    try:
        entries = {name: entries_of(area.home, name) for name in names}
    except FileNotFoundError as error:
        raise UnsafeError(f"{path} no longer exists.") from error
    if not agrees({inner: entry for every in entries.values() for inner, entry in every.items()}, seen):
        raise UnsafeError(f"{path} has changed since it was checked. It was left in place.")
    moves = {name: hidden_name(part) for part, name in enumerate(names)}
    return Change(step, do, moves, {name: mark_of(every) for name, every in entries.items()})


def _remove(area: Area, change: Change) -> None:
    """Move the entries of a step into the area, and remove them there. If one of them has changed, or if the system
    refuses something before all of them are there, all get their names back, and the error is raised."""
    try:
        for name, hidden in change.moves.items():
            area.take(name, change.marks[name], hidden)
        area.done()
    except (UnsafeError, OSError):
        area.give_back(change.moves)
        area.clear()
        raise
    _clear(area, change)


def _finish(area: Area, change: Change) -> None:
    """Note that a change is done, and remove the hidden entries, which are not needed any more."""
    area.done()
    _clear(area, change)


def _clear(area: Area, change: Change) -> None:
    for hidden in change.moves.values():
        area.remove(hidden)
    area.clear()
