"""Which steps of a run are whole: by their geometry, and by the markers of their trainers.

Geometry: a step is opened, and each number in its descriptions compared with the files that there are; files that are
not opened are whole as archives. A step whose files have the names and sizes of one that was opened is not opened
again, unless it may be the last good one. Markers: files that trainers write last, and names of steps.

A step is good if its bytes are there, and no marker says that it was not finished.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ckptconv.errors import CkptconvError, CorruptError, FailedError, MissingError, StoppedError, UsageError
from ckptconv.features.steps.marks import marks_of
from ckptconv.features.steps.registered import EXTENTS
from ckptconv.features.steps.run import SUFFIXES, Run, Step, is_beside_weights
from ckptconv.features.steps.torn import torn_file
from ckptconv.formats.detect import open_source
from ckptconv.formats.registered import describing
from ckptconv.formats.source import Source
from ckptconv.pickles.children import walk
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some

# Small files that need not be alike in two steps, and that are looked at in each.
_TEXTS = (".json", ".txt", ".jsonl", ".log", ".yaml", ".yml", ".csv", ".md", ".py")
# Ends of names that trainers choose themselves.
_CHOSEN = (*SUFFIXES, ".distcp", ".json", ".pkl")
_OPTIMIZER_FILE = re.compile(r"(?:.*[-_./])?optim(?:izer)?s?(?:[-_.].*)?")
_DIGITS = re.compile(r"\d+")


class Judged(NamedTuple):
    """A step, and what is known of it.

    `whole`: whether the bytes of every tensor are there; None if its format is not read. `why` says why not. `marked`:
    what its markers say; None if it has none. `marks` says which. `like` is the step of the same names and sizes that
    was opened in its place. `weights` and `optimizer` are bytes of tensors. `path` is that of the checkpoint that
    was opened for the weights: the step, or a file of it. `reads` are the other directories that a virtual step is made
    of, without links.
    """

    step: Step
    format: str = ""
    whole: bool | None = None
    why: str = ""
    marked: bool | None = None
    marks: str = ""
    weights: int = 0
    optimizer: int = 0
    like: str = ""
    path: str = ""
    reads: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return self.whole is True and self.marked is not False

    @property
    def rest(self) -> int:
        """Bytes of its files that are no tensors'."""
        return max(self.step.bytes - self.weights - self.optimizer, 0)


class Reading(NamedTuple):
    """How a run is read: the options of its store; whether steps that are attacks are opened; and whether each step is
    opened, as those are whose data is read."""

    storage_options: Mapping[str, Any] = {}
    inert: bool = False
    each: bool = False


def judged(run: Run, reading: Reading = Reading()) -> list[Judged]:  # noqa: B008
    """Return what is known of each step, in the order of the run. No tensor data is read."""
    done: dict[str, Judged] = {}
    known: dict[frozenset[tuple[str, int]], Judged] = {}
    marks = marks_of(run)
    shapes = {step.name: step.shapes for step in run.steps}
    # Names without a suffix that trainers choose may be hashes of what is in them.
    names = {
        step.name: {_DIGITS.sub("#", path) for path in shapes[step.name] if path.endswith(_CHOSEN)}
        for step in run.steps
        if not step.is_made_here
    }
    # Steps that markers speak against come last: most look like one that was opened.
    newest_first = [*reversed(run.steps)]
    newest_first.sort(key=lambda step: marks[step.name][0] is False)
    has_good = False
    for step in newest_first:
        shape = frozenset((path, size) for path, size in shapes[step.name].items() if not path.endswith(_TEXTS))
        other = known.get(shape)
        if other is not None and has_good and not reading.each:
            step_judged = _alike(step, other)
        else:
            step_judged = opened(step, reading)
            if step_judged.whole:
                known[shape] = step_judged
        step_judged = done[step.name] = _marked(step_judged, marks)
        has_good = has_good or step_judged.is_good
    while True:
        every = _compared([done[step.name] for step in run.steps], names)
        last = newest_good(every)
        if last is None or not last.like:
            return every
        done[last.step.name] = _marked(opened(last.step, reading), marks)


def newest_good(steps: Sequence[Judged]) -> Judged | None:
    """Return the last good one of `steps`, which are in the order of a run; None if there is none."""
    return next((each for each in reversed(steps) if each.is_good), None)


def _alike(step: Step, other: Judged) -> Judged:
    """Return what is known of a step of the names and sizes of another one, without opening it."""
    try:
        torn = torn_file(step, in_full=False)
    except StoppedError:
        raise
    except CkptconvError as error:
        return Judged(step, why=error.message)
    return other._replace(step=step, whole=not torn, why=torn, like=other.step.name)


def _marked(found: Judged, marks: Mapping[str, tuple[bool | None, str]]) -> Judged:
    marked, said = marks[found.step.name]
    return found._replace(marked=marked, marks=said)


def opened(step: Step, reading: Reading) -> Judged:
    """Return what opening a step tells of its geometry, and what it is made of."""
    found = _opened(step, reading)
    # A virtual step that cannot be read today may be mended, as long as all that it is made of is there.
    with contextlib.suppress(CkptconvError):
        found = found._replace(reads=tuple(_read_elsewhere(step)))
    return found


def _opened(step: Step, reading: Reading) -> Judged:
    if step.unlisted:
        return Judged(step, why=step.unlisted)
    if not step.files:
        return Judged(step, whole=False, why="it has no files")
    try:
        torn = torn_file(step, in_full=True)
        if torn:
            return Judged(step, whole=False, why=torn)
        described = [*_described(step)]
        if is_remote(step.place.path) and described:
            module = described[0][0]
            weights, optimizer = module.extent_of(step.place)
            return Judged(step, module.CALLED, True, weights=weights, optimizer=optimizer, path=step.place.path)
        sources = sources_of(step, reading)
        for module, directory in described:
            module.extent_of(directory)
    except StoppedError:
        raise
    except CorruptError as error:
        return Judged(step, whole=False, why=error.message)
    except CkptconvError as error:
        # What a store does not answer tells nothing of a step; a file here may be gone, or another user's.
        if isinstance(error, FailedError) and is_remote(step.home.path):
            raise
        return Judged(step, why=error.message)
    lost = next(filter(None, map(_lost, sources)), "")
    source = sources[0]
    weights = _nbytes(source.weights)
    optimizer = sum(_nbytes(each.optimizer) for each in sources) or sum(
        entry.file.size for path, entry in step.files.items() if _OPTIMIZER_FILE.fullmatch(path.rpartition("/")[2])
    )
    return Judged(step, source.format, not lost, lost, weights=weights, optimizer=optimizer, path=source.path)


def sources_of(step: Step, reading: Reading) -> list[Source]:
    """Open a step, with the states of its optimizer if they can be read: the checkpoint that it is, or if it is none,
    each of its files that is one, that with the weights first."""
    if not step.is_files:
        try:
            return [_with_states(step.place, reading)]
        except (CorruptError, FailedError, StoppedError, MissingError):
            raise
        except UsageError:
            if not _files_of(step):
                raise
    return [_with_states(step.at(path), reading) for path in _files_of(step)]


def _with_states(place: Location, reading: Reading) -> Source:
    try:
        return _open(place, reading, states=True)
    except (CorruptError, FailedError, StoppedError):
        raise
    except CkptconvError:
        return _open(place, reading)


def _files_of(step: Step) -> list[str]:
    """Return the paths of the files of a step that are checkpoints by their names, those with weights first."""
    paths = [path for path in step.files if path.endswith(SUFFIXES) and path.count("/") < 2]
    return sorted(paths, key=lambda path: (is_beside_weights(path), path))


def _open(place: Location, reading: Reading, states: bool = False) -> Source:
    stores = dict(reading.storage_options)
    return open_source(
        place.path, states=states, structure=False, inert=reading.inert, storage_options=stores, known=place
    )


def _described(step: Step) -> Iterator[tuple[Any, Location]]:
    """Yield the directories in a step that are described by a file of their own, each with the module that tells its
    extent: a step may have more than are converted, such as a critic beside its actor."""
    for above, _, name in (path.rpartition("/") for path in step.files):
        if name in EXTENTS:
            yield import_module(EXTENTS[name]), step.home.join(*above.split("/"))


def _read_elsewhere(step: Step) -> Iterator[str]:
    """Yield the local directories outside of a virtual step that it is made of, without links."""
    reader, own = describing(step.place.path), os.path.realpath(step.path)
    for root in import_module(reader).load(step.place, look=False).roots if reader else ():
        place = os.path.realpath(root)
        if not is_remote(root) and not f"{place}/".startswith(f"{own}/"):
            yield place


def _lost(source: Source) -> str:
    """Say what of an opened checkpoint is not there; "" if all is."""
    for error in (source.weights_error, source.of_states.error):
        if isinstance(error, CorruptError):
            return error.message
    if source.unaccounted:
        return f"the data of {some(source.unaccounted)} is nowhere in it"
    return ""


def _nbytes(tree: Any) -> int:
    """Return the bytes of the tensors in a tree, of those that are one object once."""
    return sum(node.nbytes for node in walk(tree) if isinstance(node, LazyTensor))


def _compared(steps: Sequence[Judged], names: Mapping[str, set[str]]) -> list[Judged]:
    """Return the steps of a run, compared with one another by the `names` of their files: one is not whole, if it lacks
    a file that all other good ones have, of directories or of files. The oldest is compared with none, as a run may be
    saved otherwise from some step on."""
    lacking: dict[str, set[str]] = {}
    for is_files in (False, True):
        good = [step.step.name for step in steps if step.is_good and step.step.is_files == is_files]
        good = [name for name in good if name in names]
        counts = Counter(path for name in good for path in names[name])
        shared = {path for path, count in counts.items() if count >= len(good) - 1}
        lacking |= {name: shared - names[name] for name in good[1:]}
    return [
        step._replace(whole=False, why=f"it lacks {some(sorted(lost), form=str)}, which all other steps have")
        if (lost := lacking.get(step.step.name))
        else step
        for step in steps
    ]
