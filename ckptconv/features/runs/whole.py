"""The check of a run's steps for completeness: by their geometry, and by the markers of their trainers.

Geometry: a step is opened, and each number in its descriptions is compared with the files that exist; files that are
not opened are checked as archives. A step with the same file names and sizes as an opened step is not opened again,
unless it may be the last good one. Markers: files that trainers write last, and names of steps.

A step is good if its bytes are there, and no marker says that it was not finished.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ckptconv.errors import CkptconvError, CorruptError, FailedError, MissingError, StoppedError, UsageError
from ckptconv.features.runs.marks import Marks, marks_of
from ckptconv.features.runs.names import SUFFIXES, is_beside_weights
from ckptconv.features.runs.places import check_answer
from ckptconv.features.runs.registered import EXTENTS
from ckptconv.features.runs.run import Run
from ckptconv.features.runs.step import Step
from ckptconv.features.runs.torn import torn_file
from ckptconv.formats.detect import open_source
from ckptconv.formats.optimizers import optimizers_in, subtree, weights_key
from ckptconv.formats.source import Source
from ckptconv.pickles.children import tensors_of
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some

# Small files that need not be alike in two steps, and that are looked at in each.
_TEXTS = (".json", ".txt", ".jsonl", ".log", ".yaml", ".yml", ".csv", ".md", ".py")
# Ends of names that trainers choose themselves.
_OF_RANK = ".distcp"
WEIGHTS = (*SUFFIXES, _OF_RANK)
_CHOSEN = (*WEIGHTS, ".json", ".pkl")
_OPTIMIZER_FILE = re.compile(r"(?:.*[-_./])?optim(?:izer)?s?(?:[-_.].*)?")
_DIGITS = re.compile(r"\d+")


class Judged(NamedTuple):
    """A step, and what is known of it.

    `marks` are what its markers say. `whole`: whether the bytes of every tensor are there; None if its format is not
    read. `why` says why not. `like` is the step of the same names and sizes that was opened in its place. `weights` and
    `optimizer` are bytes of tensors. `path` is that of the checkpoint that was opened for the weights: the step, or a
    file of it. `read` are the files of it from which weights or states of the optimizer are read. `others` are files
    of it that hold other weights, by their names; `left` are parts of the checkpoint besides weights and states of the
    optimizer, by name, with their tensors or None for what was not read; `inner` are the names of optimizers in one
    file with the weights. `damage` is what reading its data tells against it, if it was read.
    """

    step: Step
    marks: Marks
    format: str = ""
    whole: bool | None = None
    why: str = ""
    weights: int = 0
    optimizer: int = 0
    like: str = ""
    path: str = ""
    read: frozenset[str] = frozenset()
    others: Sequence[str] = ()
    left: Mapping[str, Sequence[Any]] = {}
    inner: Sequence[str] = ()
    damage: str = ""

    @property
    def is_good(self) -> bool:
        return self.whole is True and self.marks.says is not False and not self.damage

    @property
    def rest(self) -> int:
        """Bytes of its files that are no tensors'."""
        return max(self.step.bytes - self.weights - self.optimizer, 0)


def judged(run: Run, *, inert: bool = False, each: bool = False) -> list[Judged]:
    """Return the facts about each step, in the order of the run. No tensor data is read. Steps that are attacks are
    opened only if `inert`; with `each`, each step is opened, as are those whose data is read."""
    marks = marks_of(run)
    steps = {step.name: Judged(step, marks[step.name]) for step in run.steps}
    shapes = {step.name: step.shapes for step in run.steps}
    opened_as: dict[frozenset[tuple[str, int]], Judged] = {}
    has_good = False
    # The newest first. Steps that markers speak against come last: most look like one that was opened.
    newest_first = [*reversed(run.steps)]
    newest_first.sort(key=lambda step: marks[step.name].says is False)
    for step in newest_first:
        shape = frozenset((path, size) for path, size in shapes[step.name].items() if not path.endswith(_TEXTS))
        if has_good and shape in opened_as and not each:
            known = _alike(steps[step.name], opened_as[shape])
        else:
            known = opened(steps[step.name], inert)
            if known.whole:
                opened_as[shape] = known
        steps[step.name] = known
        has_good = has_good or known.is_good
    # Names without a suffix that trainers choose may be hashes of what is in them.
    names = {
        step.name: {_DIGITS.sub("#", path) for path in shapes[step.name] if path.endswith(_CHOSEN)}
        for step in run.steps
        if not step.is_made_here
    }
    while True:
        compared = _compared([*steps.values()], names)
        last = newest_good(compared)
        if last is None or not last.like:
            return compared
        steps[last.step.name] = opened(last, inert)


def newest_good(steps: Sequence[Judged]) -> Judged | None:
    """Return the last good one of `steps`, which are in the order of a run; None if there is none."""
    return next((step for step in reversed(steps) if step.is_good), None)


def _alike(known: Judged, other: Judged) -> Judged:
    """Return the facts about a step with the names and sizes of another one, without opening it."""
    try:
        torn = torn_file(known.step, in_full=False)
    except StoppedError:
        raise
    except CkptconvError as error:
        return known._replace(why=error.message)
    return other._replace(step=known.step, marks=known.marks, whole=not torn, why=torn, like=other.step.name)


def opened(known: Judged, inert: bool) -> Judged:
    """Return the facts that opening a step shows: whether it is whole by its geometry, and its parts."""
    step = known.step
    known = Judged(step, known.marks)
    if step.unlisted:
        return known._replace(why=step.unlisted)
    if not step.files:
        return known._replace(whole=False, why="it contains no files")
    try:
        torn = torn_file(step, in_full=True)
        return known._replace(whole=False, why=torn) if torn else _measured(known, inert)
    except StoppedError:
        raise
    except CorruptError as error:
        return known._replace(whole=False, why=error.message)
    except CkptconvError as error:
        check_answer(step.home, error)
        return known._replace(why=error.message)


def _measured(known: Judged, inert: bool) -> Judged:
    """Return the facts that the descriptions of a step show: whether all bytes are there, and their kinds. Raise the
    errors of reading them."""
    step = known.step
    described = [*_described(step)]
    if described and is_remote(step.place.path):
        module = described[0][0]
        weights, optimizer = module.extent_of(step.place)
        return known._replace(
            format=module.CALLED,
            whole=True,
            weights=weights,
            optimizer=optimizer,
            path=step.place.path,
            read=frozenset(
                path for path in step.files if path.endswith(_OF_RANK) or path.rpartition("/")[2] in EXTENTS
            ),
        )
    sources = sources_of(step, inert)
    for module, directory in described:
        module.extent_of(directory)
    lost = next(filter(None, map(_lost, sources)), "")
    of_states = tensors_of(*(source.optimizer for source in sources)) or tensors_of(*_states_in(sources[0]))
    weights, optimizer = (sum(tensor.nbytes for tensor in tensors) for tensors in (weights_of(sources[0]), of_states))
    of_optimizer = (entry.file.size for path, entry in step.files.items() if is_optimizer(path))
    return known._replace(
        format=sources[0].format,
        whole=not lost,
        why=lost,
        weights=weights,
        optimizer=optimizer or sum(of_optimizer),
        path=sources[0].path,
        read=frozenset(path for source in sources for path in read_of(step, source)),
        others=_others(step, sources[0]),
        left=sources[0].left() if sources[0].left else {},
        inner=[name for name, _ in _optimizers_in(sources[0])],
    )


def is_optimizer(path: str) -> bool:
    """Return whether a file holds an optimizer's states by its name."""
    return _OPTIMIZER_FILE.fullmatch(path.rpartition("/")[2]) is not None


def read_of(step: Step, source: Source) -> list[str]:
    """Return the files of a step from which `source` is read. Of a directory with files of ranks, these are all of
    those: which are read for some tensors does not tell whose the others are."""
    places = {path: entry.file.path for path, entry in step.files.items()}
    home = Location(source.path).parent if source.path in places.values() else Location(source.path)
    read = {home.join(*name.split("/")).path for name in source.inputs_of_all}
    read_in = {place.rpartition("/")[0] for place in read}
    return [
        path
        for path, place in places.items()
        if place in read or (path.endswith(_OF_RANK) and place.rpartition("/")[0] in read_in)
    ]


def _others(step: Step, source: Source) -> list[str]:
    """Return the files of a step that hold weights by their names, and that are not read for those of `source`."""
    read = read_of(step, source)
    return [path for path in step.files if path.endswith(WEIGHTS) and not is_beside_weights(path) and path not in read]


def weights_of(source: Source) -> list[LazyTensor]:
    """Return the tensors of the weights of `source`, without other contents that a training saves in one file with
    them."""
    others = {id(tensor) for tensor in tensors_of(source.optimizer, *_states_in(source))}
    weights = tensors_of(subtree(source.weights, weights_key(source.weights)))
    return [tensor for tensor in weights if id(tensor) not in others]


def _states_in(source: Source) -> Iterator[Any]:
    """Yield the state dicts of optimizers that are saved in one file with the weights of `source`."""
    return (states for _, states in _optimizers_in(source))


def _optimizers_in(source: Source) -> list[tuple[str, Any]]:
    return optimizers_in(source.weights, weights_key(source.weights))


def sources_of(step: Step, inert: bool) -> list[Source]:
    """Open a step, with the states of its optimizer if they can be read: the checkpoint that it is, or if it is none,
    each of its files that is one, that with the weights first."""
    files = [path for path in step.files if path.endswith(SUFFIXES) and path.count("/") < 2]
    files.sort(key=lambda path: (is_beside_weights(path), path))
    if not step.is_files:
        try:
            return [_with_states(step.place, inert)]
        except MissingError:
            raise
        except UsageError:
            if not files:
                raise
    return [_with_states(step.at(path), inert) for path in files]


def _with_states(place: Location, inert: bool) -> Source:
    try:
        return _open(place, inert, states=True)
    except (CorruptError, FailedError, StoppedError):
        raise
    except CkptconvError:
        return _open(place, inert)


def _open(place: Location, inert: bool, states: bool = False) -> Source:
    stores = dict(place.options)
    return open_source(place.path, states=states, structure=False, inert=inert, storage_options=stores, known=place)


def _described(step: Step) -> Iterator[tuple[Any, Location]]:
    """Yield the directories in a step that are described by a file of their own, each with the module that tells its
    extent: a step may have more than are converted, such as a critic beside its actor."""
    for above, _, name in (path.rpartition("/") for path in step.files):
        if name in EXTENTS:
            yield import_module(EXTENTS[name]), step.home.join(*above.split("/"))


def _lost(source: Source) -> str:
    """Return a sentence on the lost bytes of an opened checkpoint; "" if there are none."""
    for error in (source.weights_error, source.of_states.error):
        if isinstance(error, CorruptError):
            return error.message
    if source.unaccounted:
        return f"the data of {some(source.unaccounted)} is missing"
    return ""


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
