"""Finds a checkpoint below the directory of a run or of a training step, as frameworks lay them out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from ckptconv.errors import CorruptError, UsageError
from ckptconv.formats.run_names import CRITIC, HOLDERS, RELEASE, STEP, TRACKERS, is_known, is_of_optimizer
from ckptconv.storage.location import Location
from ckptconv.text import some

# The directory of the shards that HuggingFaceStorageWriter consolidates into an ordinary set.
SHARDED = "sharded"
_LONGEST_POINTER = 4096
# The most levels between the given directory and the checkpoint: run, step, actor, model.
_LEVELS = 4


class Located(NamedTuple):
    """A checkpoint's directory, that of its optimizer if it is another, and a note on why this one was taken.

    `pointers` are the paths of files that named it.
    """

    directory: Location
    optimizer: Location | None = None
    note: str = ""
    pointers: tuple[str, ...] = ()


def locate(
    place: Location, is_here: Callable[[Location], bool], *, takes_last: bool = True, levels: int = _LEVELS
) -> Located | None:
    """Return the checkpoint in a directory: the directory itself, or one that a framework put at most `levels` below.
    Return None if there is none. `is_here` recognizes a checkpoint's directory. If there are several steps, and no file
    names one, the last is taken if `takes_last`.

    Raise UsageError if there are several, and it is unclear which is meant; CorruptError if a file names a step that
    does not exist.
    """
    if is_here(place):
        return Located(place)
    if not levels:
        return None

    def below(name: str) -> Located | None:
        return locate(place.child(name), is_here, takes_last=takes_last, levels=levels - 1)

    named = pointed(place)
    if named:
        step, pointer = named
        located = below(step.name)
        return _noted(located, f"Took {step.name}, as {pointer.name} specifies.", pointer.path) if located else None
    lost = _pointer(place)
    if lost:
        known_steps = some([*_steps(place).values()], form=str)
        raise CorruptError(
            f"{lost} specifies a step that does not exist; the directory contains {known_steps or 'no steps'}.",
            "Give the directory of a step.",
        )
    names = [name for name, entry in place.names.items() if entry.kind == "directory" and not name.startswith(".")]
    beside = _beside(place, [name for name in names if is_known(name) and is_here(place.child(name))])
    if beside:
        return beside
    steps = _steps(place)
    last = sorted(steps, reverse=True)
    located_steps = ((steps[step], located) for step in last if (located := below(steps[step])))
    taken = next(located_steps, None)
    if taken:
        others = [] if takes_last else [name for name, _ in located_steps]
        if others:
            raise UsageError(
                f"{place} contains checkpoints of several steps: {some([taken[0], *others][::-1], form=str)}.",
                f"Give one of them: {place.join(taken[0])}",
            )
        why = f", the last of {len(steps)} steps" if len(steps) > 1 else ""
        return _noted(taken[1], f"Took {taken[0]}{why}.")
    holders = [(name, located) for name in HOLDERS if name in names and (located := below(name))]
    if not holders:
        return None
    name, located = holders[0]
    critic = name != CRITIC and any(role == CRITIC for role, _ in holders)
    more = f" {place.join(CRITIC)} is another model. To convert it, give this path." if critic else ""
    return _noted(located, f"Took {name}.{more}")


def pointed(place: Location) -> tuple[Location, Location] | None:
    """Return the step's directory that a file in a run's directory names, if it exists, and the file."""
    pointer = _pointer(place)
    if pointer is None:
        return None
    said = _said(pointer)
    if said == RELEASE:
        name = RELEASE if RELEASE in place.names else None
    else:
        name = _steps(place).get(int(said)) if re.fullmatch(r"[0-9]{1,18}", said) else None
    return (place.child(name), pointer) if name else None


def _pointer(place: Location) -> Location | None:
    pointers = (name for name in TRACKERS if name in place.names and place.names[name].kind == "file")
    return next((place.join(name) for name in pointers), None)


def _said(pointer: Location) -> str:
    """Return the content of a pointer file, "" if it has none."""
    text = pointer.read_text(_LONGEST_POINTER)
    key = TRACKERS[pointer.name]
    if key is None:
        return text.strip()
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return str(tree.get(key, "")) if isinstance(tree, dict) else ""


def _beside(place: Location, names: list[str]) -> Located | None:
    """Return the checkpoint in the directories `names`, by the names that frameworks give a model and its optimizer."""
    optimizers = [name for name in names if is_of_optimizer(name)]
    models = [name for name in names if name not in optimizers]
    if len(models) > 1 and SHARDED in models:
        models.remove(SHARDED)
    if len(models) > 1 or (not models and len(optimizers) > 1):
        raise UsageError(f"{place} contains several checkpoints: {', '.join(sorted(names))}.", "Give one of them.")
    optimizer = place.join(optimizers[0]) if len(optimizers) == 1 else None
    if models:
        return Located(place.join(models[0]), optimizer)
    return Located(optimizer) if optimizer else None


def _noted(located: Located, note: str, *pointers: str) -> Located:
    """Return the checkpoint that was `located` further below, with this level's note and pointers before its own."""
    return located._replace(note=f"{note} {located.note}".rstrip(), pointers=(*pointers, *located.pointers))


def _steps(place: Location) -> dict[int, str]:
    """Return the directories of steps in a directory, by their number."""
    names = [name for name, entry in place.names.items() if entry.kind == "directory"]
    return {int(match[1]): name for name in names if (match := re.fullmatch(STEP, name))}
