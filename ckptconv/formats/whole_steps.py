"""Which steps of a run are whole: by their geometry, and by the markers of their trainers.

Geometry: a step is opened, and each number in its descriptions compared with the files that there are; files that are
not opened are whole as archives. A step whose files have the names and sizes of one that was opened is not opened
again, unless it may be the last good one. Markers: files that trainers write last, and names of steps.

A step is good if its bytes are there, and no marker says that it was not finished.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ckptconv.errors import (
    UNWRITTEN,
    CkptconvError,
    CorruptError,
    FailedError,
    MissingError,
    StoppedError,
    UsageError,
    leaving,
)
from ckptconv.formats import safetensors
from ckptconv.formats.detect import open_source
from ckptconv.formats.model_files import MAX_HEADER, SUFFIX
from ckptconv.formats.registered import describing
from ckptconv.formats.run_names import LATEST_UNIVERSAL
from ckptconv.formats.run_steps import SUFFIXES, Run, Step, is_beside_weights, run_at
from ckptconv.formats.runs import STEP_MANIFEST
from ckptconv.formats.source import Source
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES
from ckptconv.pickles.children import walk
from ckptconv.process import of_feature
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote, normalize
from ckptconv.storage.reading import Entry
from ckptconv.storage.zip_directory import TAIL, ends_there, find_end
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some

# What describes a directory of torch.distributed.checkpoint.
METADATA = ".metadata"
# Files that trainers write when a step is complete, or that say what it consists of. Not every release writes them: one
# is missed where other steps of the run have it.
MARKERS = (
    METADATA,
    STEP_MANIFEST,
    "integrity.json",
    "trainer_state.json",
    "ckpt_contents.json",
    "checkpoint_manifest.json",
    "checkpoint_metadata.json",
    "commit_success.txt",
    "metadata.json",
    "data.pt",
    "_SUCCESS",
    "COMMITTED",
)
# What transformers' Trainer writes before `trainer_state.json`, which it needs to go on.
_OF_TRAINER = re.compile(r"training_args\.bin|scheduler\.(?:pt|bin)|rng_state(?:_\d+)?\.pth|optimizer\.(?:pt|bin)")
_TRAINER_STATE, _TRAINER_STEP = "trainer_state.json", re.compile(r"checkpoint-\d+")
# Small files that need not be alike in two steps, and that are looked at in each; at most so many bytes are parsed.
_TEXTS, _MOST_JSON = (".json", ".txt", ".jsonl", ".log", ".yaml", ".yml", ".csv", ".md", ".py"), 64 << 20
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
    of.
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


def is_made_here(step: Step) -> bool:
    """Whether this program made a step of another one: then it may lack what that had."""
    names = (path.rpartition("/")[2] for path in step.files)
    return any(name.startswith(HIDDEN) or bool(describing(name)) for name in names)


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
    marks = _marks(run)
    has_good = False
    for step in reversed(run.steps):
        shape = frozenset((path, size) for path, size in step.shapes.items() if not path.endswith(_TEXTS))
        other = known.get(shape)
        if other is not None and has_good and not reading.each:
            torn = _torn_file(step, in_full=False)
            found = other._replace(step=step, whole=not torn, why=torn, like=other.step.name)
        else:
            found = opened(step, reading)
            if found.whole:
                known[shape] = found
        found = done[step.name] = _marked(found, marks)
        has_good = has_good or found.is_good
    while True:
        every = _compared([*done.values()][::-1])
        last = newest_good(every)
        if last is None or not last.like:
            return every
        done[last.step.name] = _marked(opened(last.step, reading), marks)


def newest_good(steps: Sequence[Judged]) -> Judged | None:
    """Return the last good one of `steps`, which are in the order of a run; None if there is none."""
    return next((each for each in reversed(steps) if each.is_good), None)


@leaving(UNWRITTEN)
def of_last_good(words: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return the words of `convert` with the last good step in the place of each run; `options` are those of `convert`,
    which has several inputs if OUTPUT is a directory of outputs. Raise CorruptError if no step is good."""
    count = len(words) if "output_dir" in options else 1
    found = {word: newest_good(_judged_at(word, options)) for word in words[:count]}
    for word, step in found.items():
        if step is None:
            raise CorruptError(f"No step of {word} is good.", "`ckptconv inspect` of a step says why.")
    return [*(step.path for step in found.values() if step), *words[count:]]


def advise(error: CkptconvError, path: str, options: Mapping[str, Any]) -> None:
    """Add to the error of converting the run at `path` which step is the last good one, if the newest is not."""
    with contextlib.suppress(CkptconvError):
        steps = _judged_at(path, options)
        last = newest_good(steps)
        if last is not None and last is not steps[-1]:
            good = f"The last good step of the run is {last.step.path}: --last-good takes it."
            error.hint = f"{good} {error.hint}".rstrip()


def _judged_at(path: str, options: Mapping[str, Any]) -> list[Judged]:
    stores = dict(options.get("storage_options", {}))
    return judged(run_at(Location(normalize(path), stores)), Reading(stores, options.get("inert", False)))


def _marked(found: Judged, marks: Mapping[str, tuple[bool | None, str]]) -> Judged:
    marked, said = marks[found.step.name]
    return found._replace(marked=marked, marks=said)


def opened(step: Step, reading: Reading) -> Judged:
    """Return what opening a step tells of its geometry."""
    if not step.files:
        return Judged(step, whole=False, why="it has no files")
    try:
        torn = _torn_file(step, in_full=True)
        if torn:
            return Judged(step, whole=False, why=torn)
        extents = of_feature("dcp", "extent")
        if is_remote(step.place.path) and _is_dcp(step) and extents:
            extent = extents.extent_of(step.place)
            return Judged(
                step,
                "torch.distributed.checkpoint",
                True,
                weights=extent.weights,
                optimizer=extent.optimizer,
                path=step.place.path,
            )
        sources = sources_of(step, reading)
        for directory in _described(step) if extents else ():
            extents.extent_of(directory)
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
    reader = describing(step.place.path)
    roots = import_module(reader).load(step.place, look=False).roots if reader else ()
    reads = tuple(root for root in roots if not f"{root}/".startswith(f"{step.path}/"))
    found = Judged(step, source.format, not lost, lost, weights=weights, optimizer=optimizer)
    return found._replace(path=source.path, reads=reads)


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
    return [_with_states(step.home.join(*path.split("/")), reading) for path in _files_of(step)]


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
    return open_source(place.path, states=states, structure=False, inert=reading.inert, storage_options=stores)


def _is_dcp(step: Step) -> bool:
    return any(path.rpartition("/")[2] == METADATA for path in step.files)


def _described(step: Step) -> list[Location]:
    """Return the directories of torch.distributed.checkpoint in a step: it may have more than are converted, such as a
    critic beside its actor."""
    paths = (path.rpartition("/") for path in step.files)
    return [step.home.join(*above.split("/")) for above, _, name in paths if name == METADATA]


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


# -------------------------------------------------------------------------------------------------- files as archives


def _torn_file(step: Step, in_full: bool) -> str:
    """Say which local file of a step is cut short, by how such files end; "" if none is. With `in_full`, headers of
    safetensors are read whole."""
    if is_remote(step.place.path):
        return ""
    for path, entry in step.files.items():
        if entry.kind == "missing":
            return f"{path} leads nowhere"
        place, name = step.home.join(*path.split("/")), path.rpartition("/")[2]
        why = _torn(place, name, entry) if entry.kind == "file" else ""
        if why:
            return f"{path} {why}"
        if in_full and name.endswith(SUFFIX):
            safetensors.header_of(place)
    return ""


def _torn(place: Location, name: str, entry: Entry) -> str:
    size = entry.file.size
    is_archive = name.endswith((*TORCH_SUFFIXES, ".pkl", ".pickle"))
    if not (is_archive or name == METADATA or name.endswith((SUFFIX, ".json"))):
        return ""
    if not size:
        return "is empty"
    with place.at(entry.file).open_reader() as reader:
        if name.endswith(".json"):
            return _torn_json(reader.read_at(0, size)) if size <= _MOST_JSON else ""
        head = reader.read_at(0, min(size, 8))
        if name.endswith(SUFFIX):
            length = int.from_bytes(head, "little")
            return "" if len(head) == 8 and 2 <= length <= min(size - 8, MAX_HEADER) else "ends within its header"
        if head.startswith(LOCAL_SIGNATURE):
            for most in (22, TAIL):
                tail = reader.read_at(max(size - most, 0), min(size, most))
                if ends_there(tail, find_end(tail)):
                    return ""
            return "is a zip archive without its end"
        if name == METADATA or (head[:1] == b"\x80" and not name.endswith(TORCH_SUFFIXES)):
            return "" if reader.read_at(size - 1, 1) == b"." else "is a pickle without its end"
        return "" if head.strip(b"\0") else "begins with zeros only"


def _torn_json(data: bytes) -> str:
    try:
        json.loads(data)
    except RecursionError:
        return ""
    except ValueError:
        return "is no JSON to its end"
    return ""


# ------------------------------------------------------------------------------------------------------------ markers


def _marks(run: Run) -> dict[str, tuple[bool | None, str]]:
    """Return what markers say of each step, and which do."""
    names = {step.name: {path.rpartition("/")[2] for path in step.files} for step in run.steps}
    used = [marker for marker in MARKERS if sum(marker in each for each in names.values()) > 1]
    last = next(
        (
            (pointer, step)
            for pointer, name in run.pointers.items()
            if pointer != LATEST_UNIVERSAL
            for step in run.steps
            if step.name == name
        ),
        None,
    )
    found: dict[str, tuple[bool | None, str]] = {}
    for step in run.steps:
        against = list(_against(step, names[step.name], used, last))
        own = [marker for marker in MARKERS if marker in names[step.name]]
        own += [pointer for pointer, name in run.pointers.items() if name == step.name]
        found[step.name] = (False, "; ".join(against)) if against else (True, ", ".join(own)) if own else (None, "")
    return found


def _against(step: Step, names: set[str], used: Iterable[str], last: tuple[str, Step] | None) -> Iterator[str]:
    """Yield what says that a step was not finished."""
    if step.is_named_unfinished:
        yield "its name is that of a step that is being written"
    missed = [] if is_made_here(step) else [marker for marker in used if marker not in names]
    if missed:
        yield f"it lacks {some(missed, form=str)}, which other steps have"
    is_of_trainer = (
        not is_made_here(step) and _TRAINER_STEP.fullmatch(step.name) and any(map(_OF_TRAINER.fullmatch, names))
    )
    if is_of_trainer and _TRAINER_STATE not in (*names, *missed):
        yield f"it lacks {_TRAINER_STATE}, which the Trainer writes last"
    if last and step.number is not None and last[1].number is not None and step.number > last[1].number:
        yield f"{last[0]} names {last[1].name}, and no later step"


def _compared(steps: Sequence[Judged]) -> list[Judged]:
    """Return the steps of a run, compared with one another: one is not whole, if it lacks a file that all other good
    ones have. Names without a suffix that trainers choose may be hashes of what is in them. The oldest is compared with
    none, as a run may be saved otherwise from some step on."""
    good = [each for each in steps if each.is_good and not is_made_here(each.step)]
    names = {
        each.step.name: {_DIGITS.sub("#", path) for path in each.step.shapes if path.endswith(_CHOSEN)} for each in good
    }
    counts = Counter(name for own in names.values() for name in own)
    shared = {name for name, count in counts.items() if count >= len(good) - 1}
    lacking = {each.step.name: shared - names[each.step.name] for each in good[1:]}
    return [
        each._replace(whole=False, why=f"it lacks {some(sorted(lost), form=str)}, which all other steps have")
        if (lost := lacking.get(each.step.name))
        else each
        for each in steps
    ]
