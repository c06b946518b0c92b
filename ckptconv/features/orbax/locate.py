"""Finds a step of Orbax by its directory, that of an item in it, or that of the run; and checks that it is complete.

Source: orbax/checkpoint/_src/path/{step,atomicity}.py. A step and its items are written under names with
.orbax-checkpoint-tmp in them, and renamed. In Google's store, commit_success.txt is written last.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.features.ocdbt import database
from ckptconv.features.orbax import tree
from ckptconv.formats.format import CERTAIN, POSSIBLE, Guess, Probe
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location
from ckptconv.text import some

FAMILY = "orbax"
_GUESS = Guess(CERTAIN, "an Orbax checkpoint", "convert {} OUTPUT")
_CHECKPOINT, _COMMITTED, _TIME = "_CHECKPOINT_METADATA", "commit_success.txt", "commit_timestamp_nsecs"
# Names in a complete step.
MARKERS = (_COMMITTED,)
_MARKS = (tree.NAME, database.NAME)
_UNFINISHED, _OF_PROCESS = ".orbax-checkpoint-tmp", "ocdbt.process_"
_STEP = re.compile(r"(?:.*_)?(\d{1,18})")
# Stores where files have their final names from the beginning.
WITHOUT_RENAME = ("gs://", "gcs://")
# Names of items for steps without metadata; the most steps that are opened to recognize a run.
_ITEMS, _LOOKED_AT = ("default", "items", "state", "params"), 4
_MOST = 1 << 20
# The directory of an item that describes its arrays.
_DESCRIPTIONS = "array_metadatas"


class Step(NamedTuple):
    """A complete step: its directory, its items by name ("" for the directory itself), and why it was taken: a note, or
    a warning if a later one is not complete."""

    place: Location
    items: dict[str, Location]
    note: str = ""
    warning: str = ""


def sniff(probe: Probe) -> Guess | None:
    """Recognize a directory of a step, an item or a run; or a file that describes one."""
    place = probe.place
    if probe.is_file:
        is_one = place.name in (*_MARKS, _CHECKPOINT) and _is_here(place.parent)
        return _GUESS._replace(place=place.parent) if is_one else None
    # The data of a database, in its own directory.
    if place.name == "d" and probe.is_directory and place.parent.has_file(database.NAME):
        return _GUESS
    is_one = probe.is_directory and (_is_here(place) or any(map(_is_here, _steps(place)[:_LOOKED_AT])))
    return _GUESS if is_one else _GUESS._replace(sure=POSSIBLE) if _is_part(probe) else None


def _is_part(probe: Probe) -> bool:
    """Return whether a path is a directory of descriptions in the directory of an item. Others are not asked for: the
    directory above may be one that cannot be listed."""
    return probe.is_directory and probe.place.name == _DESCRIPTIONS and any(map(probe.place.parent.has_file, _MARKS))


def _is_here(place: Location) -> bool:
    """Return whether a directory is a step or an item, finished or not."""
    return _is_item(place) or place.has_file(_CHECKPOINT) or bool(_items(place))


def _is_item(place: Location) -> bool:
    return any(map(place.has_file, _MARKS)) or _UNFINISHED in place.name


def folders(place: Location) -> list[str]:
    """Return the names of the directories in a directory."""
    return [name for name, entry in place.names.items() if entry.kind == "directory"]


def _items(place: Location) -> dict[str, Location]:
    """Return the directories of items, finished or not, in a step's directory."""
    candidates = [name for name in folders(place) if _CHECKPOINT in place.names or name.partition(".")[0] in _ITEMS]
    return {name: place.child(name) for name in candidates if _is_item(place.child(name))}


def _steps(place: Location) -> list[Location]:
    """Return the directories of steps in a run's directory, the last first."""
    numbers = ((_STEP.fullmatch(name.partition(_UNFINISHED)[0]), name) for name in folders(place))
    return [
        place.child(name)
        for _, name in sorted(((int(match[1]), name) for match, name in numbers if match), reverse=True)
    ]


def located(place: Location) -> Step:
    """Return the step at a directory, or the last complete one in it.

    Raise CorruptError if it is incomplete, UsageError for the directory of one process.
    """
    if place.name == "d" and place.parent.has_file(database.NAME):
        raise UsageError(f"{place} contains only the data of a step.", f"Specify the step directory: {place.parent}")
    if place.name.startswith(_OF_PROCESS):
        raise UsageError(
            f"{place} contains one process's part of a step.", f"Specify the step directory: {place.parent}"
        )
    if _is_here(place):
        return _complete(place)
    steps = [*filter(_is_here, _steps(place))]
    if not steps:
        raise UsageError(f"{place} is only a part of an Orbax checkpoint.", f"Specify the checkpoint: {place.parent}")
    errors: dict[str, CorruptError] = {}
    for step in steps:
        try:
            complete = _complete(step)
        except CorruptError as error:
            errors[step.name] = error
            continue
        text = f"Took {step.name}, the last complete step."
        if errors:
            return complete._replace(warning=f"{text} Later steps are not complete: {some(errors, form=str)}.")
        return complete._replace(note=text)
    raise next(iter(errors.values()))


def _complete(place: Location) -> Step:
    """Return the step at its own directory. Raise CorruptError if a sign shows that it is unfinished."""
    beside = [name for name in (place.name, place.parent.name, *place.names) if _UNFINISHED in name]
    if beside:
        raise _unfinished(place, f"{beside[0]} has the name of an unfinished file")
    is_item = _is_item(place)
    metadata = _told(place.parent if is_item and _CHECKPOINT not in place.names else place)
    if _TIME in metadata and metadata[_TIME] is None:
        raise _unfinished(place, f"{_CHECKPOINT} records no commit time")
    items = {"": place} if is_item else _items(place)
    handlers = metadata.get("item_handlers")
    named = handlers if isinstance(handlers, dict) and not is_item else ()
    lacking = [name for name in named if name not in place.names]
    if lacking:
        raise _unfinished(place, f"it lacks {some(lacking)}, which {_CHECKPOINT} lists")
    committed = [place, place.parent] if is_item else [place, *items.values()]
    is_marked = any(marked.join(_COMMITTED).kind == "file" for marked in committed)
    if place.path.startswith(WITHOUT_RENAME) and not is_marked:
        raise _unfinished(place, f"it lacks {_COMMITTED}, which Orbax writes last in this store")
    for item in items.values():
        if not item.has_file(tree.NAME):
            raise UnsupportedError(
                f"{item} lacks {tree.NAME}, which describes its arrays. Either this file was not copied, or Orbax "
                "before 0.4 wrote the checkpoint.",
                "Copy the file, or restore the checkpoint with the release that wrote it and save it with a later one.",
            )
        if not item.has_file(database.NAME) and any(name.startswith(_OF_PROCESS) for name in item.names):
            raise _unfinished(item, f"the files of its processes were not merged: it lacks {database.NAME}")
    return Step(place, items)


def _unfinished(place: Location, why: str) -> CorruptError:
    return CorruptError(f"{place} is not complete: {why}.", "Specify another step, or a complete copy of this one.")


def _told(place: Location) -> dict[str, Any]:
    """Return a step's own metadata."""
    where = place.join(_CHECKPOINT)
    if where.kind != "file":
        return {}
    try:
        return strict_json.object_of(strict_json.parse(where.read_text(_MOST), constants=True, deepest=64), "it")
    except ValueError as error:
        raise CorruptError(f"{where} does not have the form that Orbax writes: {error}.") from None
