"""The steps of a run: directories and files whose names have the number of a step, and what says which of them counts.

Any trainer's are found: `step-100`, `global_step100`, `checkpoint-500`, `iter_0000100`, `epoch=3-step=100.ckpt`, `100`,
the tags of DeepSpeed, whatever they are called, and files such as `model_100.pt` beside `optim_100.pt`. Names alone are
read, and the files that name a step.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from ckptconv.errors import CkptconvError, CorruptError, LimitError, StoppedError, UnsupportedError, UsageError
from ckptconv.features.joining.run_layout import pointed as pointed_by
from ckptconv.features.joining.sets import parsed
from ckptconv.features.runs.beside import Beside, divided, is_our_file, is_variant, telling_series
from ckptconv.features.runs.names import (
    is_beside_weights,
    is_of_step,
    is_padded,
    is_unfinished,
    lone_number,
    number_of,
    series_of,
    stem,
)
from ckptconv.features.runs.places import check_directory, inside, known, link_of, listed
from ckptconv.features.runs.registered import TELLING
from ckptconv.features.runs.step import DESCRIBED, Step
from ckptconv.formats.detect import choose
from ckptconv.formats.format import Probe
from ckptconv.formats.model_files import SAFETENSORS, holds_whole
from ckptconv.formats.run_names import LATEST, LATEST_UNIVERSAL, MAX_TAG, POINTERS, is_tag_directory
from ckptconv.plan import NUMBERED
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import Entry
from ckptconv.text import some

_DIGITS = re.compile(r"\d+")
# Where a run keeps its steps, if not in its own directory.
_FOLDERS = ("checkpoints", "checkpoint", "ckpts", "ckpt")
# The greatest depth of the files of a step, and the most files of a step.
_DEEPEST, _MOST = 8, 5_000_000


class Run(NamedTuple):
    """The steps in the directory of a run, the oldest first.

    `pointers` are the files, and `links` the symbolic links, that name a step: {name: step}, "" for one that is not
    there. `links` are no steps themselves. `beside` has the number of a step, and is none. `is_named`: the user
    gave the pattern of its steps' names.
    """

    place: Location
    steps: tuple[Step, ...]
    pointers: Mapping[str, str]
    links: Mapping[str, str]
    beside: tuple[Beside, ...] = ()
    is_named: bool = False

    @property
    def naming(self) -> dict[str, str]:
        """Files and links that name a step: {name: step}, "" for a step that is not there."""
        return {**self.pointers, **self.links}

    @property
    def warnings(self) -> list[str]:
        """Warnings about names of steps that are not there, and about other things in the directory."""
        path = self.place.path or "."
        beside = [] if is_remote(path) else [import_module(module).warnings(path) for module in TELLING]
        above = () if is_remote(path) else _steps_around(self.place)
        return [
            *(f"{path} is itself a step: {self.place.parent.path or '.'} has {len(above)} steps." for _ in above[1:2]),
            *(f"{name} refers to a step that does not exist." for name, step in self.naming.items() if not step),
            *(sentence for sentences in beside for sentence in sentences),
        ]


def _steps_around(place: Location) -> Sequence[Step]:
    """Return the steps of the run in which the directory of a run is a step itself; none if it is in no run."""
    try:
        steps = run_at(place.parent).steps if is_of_step(place.name) or place.name.isdecimal() else ()
    except StoppedError:
        raise
    except CkptconvError:
        return ()
    return steps if any(step.name == place.name for step in steps) else ()


def run_at(place: Location) -> Run:
    """Return the run in a directory, or of a directory that has several the one whose steps have names such as
    `vit_epoch_*`, the last part of `place`. Raise UsageError if it has no steps, or those of several runs."""
    if "*" in place.name and (is_remote(place.path) or place.kind == "missing"):
        check_directory(place.parent)
        run = _run_in(place.parent, place.name)
        if not run.steps:
            raise UsageError(f"{place.parent} contains no step whose name matches {place.name}.")
        return run._replace(is_named=True)
    check_directory(place)
    run = _run_in(place)
    if run.steps and not all(_is_run(place, step.name) for step in run.steps):
        return _of_one(run)
    several = [name for name in _directories_in(place) if _is_run(place, name)]
    if len(several) > 1:
        raise UsageError(
            f"{place} contains the steps of several runs: {some(several, form=str)}.", "Specify one of them."
        )
    in_folders = (_run_in(inside(place, name)) for name in _FOLDERS if name in _directories_in(place))
    run = next((run for run in in_folders if run.steps), run)
    if run.steps:
        return _of_one(run)
    around = _steps_around(place)
    of_steps = inside(place, several[0]) if several else place.parent.path or "." if around else ""
    advice = f"Specify the directory that contains the steps{of_steps and f': {of_steps}'}."
    if _is_checkpoint(place):
        called = "one step of a run" if around or is_of_step(place.name) else "a checkpoint"
        raise UsageError(f"{place} is {called}, but the directory of a run was expected.", advice)
    raise UsageError(
        f"{place} contains no steps: none of its directories or files has a step number in its name.", advice
    )


def _of_one(run: Run) -> Run:
    """Return a run. Raise UsageError if its steps are those of several, by their names."""
    steps = telling_series(run.steps, run.beside)
    every = sorted({series for step in steps for series in step.series})
    # A step that is torn may lack a model. Models with an optimizer each may be of runs whose numbers are the same.
    whole = [step for step in steps if len(step.series) == len(every)]
    is_one = len({step.series for step in steps}) < 2 or any(step.optimizers < 2 for step in whole)
    if is_one:
        return run
    raise UsageError(
        f"{run.place} contains the steps of several runs: {some(every, form=str)}.",
        f"Specify one of them, in quotes: '{run.place.join(every[0])}'.",
    )


def _is_run(place: Location, name: str) -> bool:
    """Return whether the directory `name` has steps, in itself or in a folder for them. If it may be a step itself, the
    names of its steps need a word for a step."""
    if name not in _directories_in(place):
        return False
    is_step = is_of_step if number_of(name) is not None else lambda inner: number_of(inner) is not None
    directory = inside(place, name)
    folders = [inside(directory, folder) for folder in _FOLDERS if folder in _directories_in(directory)]
    return any(sum(map(is_step, _directories_in(inner))) > 1 for inner in (directory, *folders))


def _directories_in(place: Location) -> list[str]:
    """Return the directories in `place` that are neither hidden nor links."""
    names = [name for name, entry in listed(place)[0].items() if entry.kind == "directory" and not name.startswith(".")]
    return [name for name in names if link_of(place, name) is None]


def _run_in(place: Location, pattern: str = "") -> Run:
    """Return the steps in a directory, of those whose names are like `pattern` if there is one: that of a series, or
    else one of the shell's."""
    there = dict(place.names)
    targets = {name: target for name in there if (target := link_of(place, name)) is not None}
    for name in targets:
        del there[name]
    named = [name for name in there if series_of(name) == pattern] or fnmatch.filter(there, pattern or "*")
    own = {name: there[name] for name in named}
    others = there.keys() - own
    steps = [*_directories(place, own), *_files(place, there, own)]
    steps.sort(key=lambda step: (-1 if step.number is None else step.number, step.time or 0, step.name))
    names = {name: step.name for step in steps for name in step.names}
    links = {
        name: names.get(target, "")
        for name, target in targets.items()
        if target in names or (number_of(name) is None and target not in others)
    }
    counted, beside = divided(steps)
    return Run(place, tuple(counted), _pointers(place, there, names, others), links, tuple(beside))


def _pointers(
    place: Location, there: Mapping[str, Entry], names: Mapping[str, str], others: Collection[str]
) -> dict[str, str]:
    """Return the step that each file names which says where a checkpoint is, if it is none of the `others`."""
    pointers: dict[str, str] = {}
    for name in POINTERS:
        if name not in there or there[name].kind != "file":
            continue
        if name in (LATEST, LATEST_UNIVERSAL):
            target = place.join(name).read_text(MAX_TAG).strip()
        else:
            pointed = pointed_by(place)
            target = pointed[0].name if pointed and pointed[1].name == name else ""
        if target not in others:
            pointers[name] = names.get(target, "")
    return pointers


# ------------------------------------------------------------------------------------------------ steps: directories


def _directories(place: Location, there: Mapping[str, Entry]) -> Iterator[Step]:
    for name, entry in there.items():
        if entry.kind != "directory" or (name.startswith(".") and not is_unfinished(name)):
            continue
        directory, number = inside(place, name), number_of(name)
        if number is None and not is_tag_directory(listed(directory)[0]):
            continue
        contents = _Contents()
        contents.add(directory, name, _DEEPEST)
        virtual = [path for path in contents.files if path.endswith(DESCRIBED) and path.count("/") == 1]
        taken = place.at(contents.files[virtual[0]].file) if len(virtual) == 1 else directory
        yield Step(name, number, place, taken, contents.files, tuple(contents.links), contents.unlisted)


class _Contents:
    """The contents of the directory of a step: its files and symbolic links by their paths in the run, and why a
    directory in it could not be listed."""

    def __init__(self) -> None:
        self.files: dict[str, Entry] = {}
        self.links: list[str] = []
        self.unlisted = ""

    def add(self, place: Location, path: str, deepest: int) -> None:
        """Add the entries in and below the directory `place`, whose path in the run is `path`. Links to directories are
        not followed."""
        names, why = listed(place)
        self.unlisted = self.unlisted or why
        for name, entry in names.items():
            inner = f"{path}/{name}"
            if entry.kind in ("directory", "missing") and link_of(place, name) is not None:
                self.links.append(inner)
            elif entry.kind == "directory" and deepest:
                self.add(inside(place, name), inner, deepest - 1)
            else:
                self.files[inner] = entry
            if len(self.files) > _MOST:
                raise LimitError(f"{place} contains more than {_MOST:,} files.")


# ------------------------------------------------------------------------------------------------------ steps: files


def _files(place: Location, there: Mapping[str, Entry], own: Collection[str]) -> Iterator[Step]:
    """Yield the steps that are files of `own`: each is one, or several if their names say that they hold parts of
    it."""
    by_number: dict[int, list[str]] = {}
    for name, number in _numbered(place, there).items():
        if name in own:
            by_number.setdefault(number, []).append(name)
    for number, names in by_number.items():
        are_parts = any(is_beside_weights(name) or parsed(name) is not None for name in names)
        for group in _parts(place, there, names) if are_parts else [[name] for name in names]:
            first = min(group, key=lambda name: (is_beside_weights(name), name))
            taken = known(place.at(there[first].file), there[first])
            yield Step(first, number, place, taken, {name: there[name] for name in group})


def _parts(place: Location, there: Mapping[str, Entry], names: Sequence[str]) -> list[list[str]]:
    """Return the files of one number that are parts of a step, and by themselves those that are other forms of its
    weights: the outputs of this program, and a file whose name differs from another's in its suffix alone."""
    weights = sorted(name for name in names if not is_beside_weights(name))
    variants = [name for name in weights if any(is_variant(name, other) for other in weights)]
    written = [name for name in variants if is_our_file(known(place.at(there[name].file), there[name]))]
    stems = [stem(name) for name in weights]
    # A step may consist of outputs alone.
    forms = written if len(written) < len(weights) else []
    forms += [name for at, name in enumerate(weights) if stems[at] in stems[:at] and name not in forms]
    return [[name for name in names if name not in forms], *([name] for name in forms)]


def _numbered(place: Location, there: Mapping[str, Entry]) -> dict[str, int]:
    """Return the files that are checkpoints by their names, and have the number of a step, with that."""
    candidates = [
        name
        for name, entry in there.items()
        if entry.kind == "file" and stem(name) != name and not re.search(rf"{NUMBERED}\.", name)
    ]
    numbers = {name: number for name in candidates if (number := number_of(stem(name))) is not None}
    wide = {_DIGITS.sub("#", name) for name in candidates if is_padded(stem(name))}
    plain = {
        name: number
        for name in candidates
        if name not in numbers
        and parsed(name) is None
        and (number := lone_number(stem(name), _DIGITS.sub("#", name) in wide)) is not None
    }
    # In the directory of a step, a number without a word for a step is that of a rank.
    if plain and (is_of_step(place.name) or _is_checkpoint(place, plain)):
        return numbers
    # Elsewhere, it is that of a step if several names differ in it, or if a step has it.
    in_series: dict[str, set[int]] = {}
    for name, number in plain.items():
        in_series.setdefault(series_of(name), set()).add(number)
    several = {number for name, number in plain.items() if len(in_series[series_of(name)]) > 1}
    of_steps = several.union(numbers.values())
    all_numbers = numbers | plain
    return {name: all_numbers[name] for name in candidates if all_numbers.get(name) in of_steps}


def _is_checkpoint(place: Location, numbered: Collection[str] = ()) -> bool:
    """Return whether the directory `place` is a checkpoint itself. Models in the files `numbered` do not count: each
    may be a step."""
    if is_tag_directory(place.names):
        return True
    try:
        chosen, _ = choose(Probe(place))
    except (CorruptError, UnsupportedError, UsageError):
        return False
    return not numbered or chosen.FAMILY != SAFETENSORS or holds_whole(place.names.keys() - numbered)
