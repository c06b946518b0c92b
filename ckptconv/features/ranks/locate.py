"""Finds the files of a checkpoint that has one for each rank, in a directory, or below it."""

from __future__ import annotations

from ckptconv.errors import UsageError
from ckptconv.features.joining import run_layout
from ckptconv.features.joining.sets import MODEL, OPTIMIZER, OTHER, FileSet, holds_parts, holds_tensors, parsed, sets_of
from ckptconv.formats import model_files
from ckptconv.formats.format import CERTAIN, LIKELY, POSSIBLE, Guess, Probe
from ckptconv.formats.model_files import may_lie_below
from ckptconv.formats.torch import SUFFIXES
from ckptconv.storage.location import Location
from ckptconv.text import some

FAMILY = model_files.TORCH
GUESS = Guess(CERTAIN, "a checkpoint with one file per rank", "pt2safetensors {}")
# The file that verl writes last: the place in its data.
MARKERS = ("data.pt",)


def sniff(probe: Probe) -> Guess | None:
    """Recognize a directory with a file for each rank, or one of the files."""
    if probe.expected not in ("", FAMILY):
        return None
    place = probe.place
    if probe.is_file:
        return GUESS._replace(sure=LIKELY) if parsed(place.name) else None
    sets = [file_set for file_set in sets_of(place.names) if file_set.is_certain] if probe.is_directory else []
    if not sets:
        return None
    if all(file_set.kind == OTHER for file_set in sets):
        # Next to these, any other file may be the model.
        others = any(name.endswith(SUFFIXES) and not parsed(name) for name in place.names)
        return None if others else GUESS._replace(sure=POSSIBLE)
    # A reader means a whole model, if one is next to the ranks' files.
    ranks = {
        name for file_set in sets if 0 in file_set.files and "rank" in file_set.stem for name in file_set.files.values()
    }
    return GUESS._replace(sure=LIKELY) if model_files.holds_whole(place.names.keys() - ranks) else GUESS


def locate(place: Location) -> run_layout.Located | None:
    """Return the checkpoint in a directory, or below it; None if there is none. See `run_layout.locate`."""
    return run_layout.locate(place, _is_here, takes_last=False)


def _is_here(place: Location) -> bool:
    return any(map(holds_tensors, sets_of(place.names)))


def sniff_below(probe: Probe) -> Guess | None:
    """Recognize the directory of a run or of a step with a checkpoint in it, or below it."""
    return GUESS if may_lie_below(probe, FAMILY) and holds_below(probe.place) else None


def holds_below(place: Location) -> bool:
    """Return whether a directory has such a set, in itself or below it."""
    return locate(place) is not None or holds_parts(place)


def choose(place: Location, sets: list[FileSet]) -> FileSet:
    """Return the set of the weights. Raise UsageError if there are several."""
    for kind in (MODEL, OPTIMIZER, OTHER):
        of_kind = [file_set for file_set in sets if file_set.kind == kind]
        best = [file_set for file_set in of_kind if "model" in file_set.stem.lower()] or of_kind
        if len(best) > 1:
            names = [next(iter(file_set.files.values())) for file_set in best]
            raise UsageError(
                f"{place} contains several sets of rank files, such as those of {some(names, form=str)}.",
                f"Give a file of the set to convert: {place.join(names[0])}",
            )
        if best:
            return best[0]
    raise UsageError(f"{place} contains no rank files.", "Give the directory that contains them.")
