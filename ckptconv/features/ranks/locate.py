"""Find the files of a checkpoint that has one for each rank, in a directory, or below it."""

from __future__ import annotations

from ckptconv.errors import UsageError
from ckptconv.formats import model_files, runs
from ckptconv.formats.format import CERTAIN, LIKELY, POSSIBLE, Guess, Probe
from ckptconv.formats.joining.sets import MODEL, OPTIMIZER, OTHER, FileSet, holds_parts, holds_tensors, parsed, sets_of
from ckptconv.formats.model_files import may_lie_below
from ckptconv.formats.torch import SUFFIXES
from ckptconv.storage.location import Location
from ckptconv.text import some

FAMILY = model_files.TORCH
GUESS = Guess(CERTAIN, "a checkpoint with a file for each rank", "pt2safetensors {}")


def sniff(probe: Probe) -> Guess | None:
    """Recognize a directory with a file for each rank, or one of the files."""
    if probe.expected not in ("", FAMILY):
        return None
    place = probe.place
    if probe.is_file:
        return GUESS._replace(sure=LIKELY) if parsed(place.name) else None
    found = [each for each in sets_of(place.names) if each.is_certain] if probe.is_directory else []
    if not found:
        return None
    if all(each.kind == OTHER for each in found):
        # Beside these, any other file may be the model.
        others = any(name.endswith(SUFFIXES) and not parsed(name) for name in place.names)
        return None if others else GUESS._replace(sure=POSSIBLE)
    # A whole model beside the ranks' files is what a reader means.
    ranks = {name for each in found if 0 in each.files and "rank" in each.stem for name in each.files.values()}
    return GUESS._replace(sure=LIKELY) if model_files.holds_whole(place.names.keys() - ranks) else GUESS


def locate(place: Location) -> runs.Located | None:
    """Return the checkpoint in a directory, or below it; None if there is none. See `runs.locate`."""
    return runs.locate(place, _is_here, takes_last=False)


def _is_here(place: Location) -> bool:
    return any(map(holds_tensors, sets_of(place.names)))


def sniff_below(probe: Probe) -> Guess | None:
    """Recognize the directory of a run or of a step with a checkpoint in it, or below."""
    return GUESS if may_lie_below(probe, FAMILY) and holds_below(probe.place) else None


def holds_below(place: Location) -> bool:
    """Whether a directory has such a set, or one below it is located."""
    return locate(place) is not None or holds_parts(place)


def choose(place: Location, found: list[FileSet]) -> FileSet:
    """Return the set of the weights. Raise UsageError if there are several."""
    for kind in (MODEL, OPTIMIZER, OTHER):
        own = [each for each in found if each.kind == kind]
        best = [each for each in own if "model" in each.stem.lower()] or own
        if len(best) > 1:
            names = [next(iter(each.files.values())) for each in best]
            raise UsageError(
                f"{place} holds several sets of files of ranks, {some(names, form=str)} among them.",
                f"Name a file of the set that is meant: {place.join(names[0])}",
            )
        if best:
            return best[0]
    raise UsageError(f"{place} holds no files of ranks.", "Name the directory that they are in.")
