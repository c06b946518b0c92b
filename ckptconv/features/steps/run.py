"""The steps of a run: directories and files whose names have the number of a step, and what says which of them counts.

Any trainer's are found: `step-100`, `global_step100`, `checkpoint-500`, `iter_0000100`, `epoch=3-step=100.ckpt`, `100`,
the tags of DeepSpeed, whatever they are called, and files such as `model_100.pt` beside `optim_100.pt`. Names alone are
read, and the files that name a step.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from ckptconv.errors import CorruptError, FailedError, LimitError, MissingError, UnsupportedError, UsageError
from ckptconv.features.joining.sets import MODEL, FileSet, parsed
from ckptconv.formats import runs
from ckptconv.formats.detect import choose
from ckptconv.formats.format import Probe
from ckptconv.formats.model_files import SAFETENSORS, SUFFIX, holds_whole
from ckptconv.formats.registered import DESCRIBING
from ckptconv.formats.run_names import LATEST, LATEST_UNIVERSAL, MAX_TAG, POINTERS, is_tag_directory
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES
from ckptconv.plan import NUMBERED
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import Entry

# Words before the number of a step, the first kind first: of `epoch=3-step=100`, 100 is the step.
_WORDS = (("step", "steps", "iter", "iteration", "ba", "batch", "update"), ("checkpoint", "ckpt"), ("epoch", "ep"))
_NUMBER = re.compile(r"([a-z]*)[-_=.]*(\d{1,18})")
# What names of steps contain while they are written: of torch_checkpointing, transformers, Orbax, and of others.
_UNFINISHED = re.compile(r"\.?(?:tmp|temp)[-_.].*|.*[-_.](?:tmp|temp|part|partial|incomplete)(?:[-_.].*)?")
_DIGITS = re.compile(r"\d+")
# The whole name of the directory of a step, with a word for it.
_OF_STEP = re.compile(r"(?:\w*[-_])?(?:global_step|step|iter|checkpoint|ckpt|epoch)[-_=]?\d+")
# Ends of the names of files that are checkpoints.
SUFFIXES = (*TORCH_SUFFIXES, SUFFIX)
# Suffixes of files that describe others, of which a step consists.
_DESCRIBED = tuple(DESCRIBING)
# Where a run keeps its steps, if not in its own directory.
_FOLDERS = ("checkpoints", "checkpoint", "ckpts", "ckpt")
# How deep the files of a step lie at most, and how many files a run has.
_DEEPEST, _MOST = 8, 5_000_000


class Step(NamedTuple):
    """A step of a run: its name there, the number in it, if any, and its files by their paths in `home`, the directory
    of the run.

    `place` is what is opened: its directory, a virtual checkpoint in it, or of files the one with the weights. `links`
    are the symbolic links among its names. `is_named_unfinished`: its name is one that a trainer gives a step until it
    is complete. `unlisted` says why a directory of it could not be listed, if one could not. `is_made_here`: this
    program made it of another step, and it may lack what that had.
    """

    name: str
    number: int | None
    home: Location
    place: Location
    files: Mapping[str, Entry]
    links: tuple[str, ...] = ()
    is_named_unfinished: bool = False
    unlisted: str = ""
    is_made_here: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Its names in the directory of the run: that of its directory, or of its files."""
        return tuple(dict.fromkeys(path.partition("/")[0] for path in self.files)) or (self.name,)

    @property
    def bytes(self) -> int:
        return sum(entry.file.size for entry in self.files.values())

    @property
    def time(self) -> float | None:
        """When the last of its files changed, in seconds since 1970; None if the store does not say."""
        return max((entry.time for entry in self.files.values() if entry.time is not None), default=None)

    @property
    def shapes(self) -> dict[str, int]:
        """The sizes of its files by their paths in it, with # in the place of its own number where that is one of a
        step, and not of a rank."""
        own = re.compile(rf"(?<!\d)0*{self.number}(?!\d)")
        start = 0 if self.is_files else len(self.name) + 1
        sizes = {path[start:]: entry.file.size for path, entry in self.files.items()}
        if self.number is None:
            return sizes
        return {(_without(path, own, self.number) if own.search(path) else path): sizes[path] for path in sizes}

    @property
    def path(self) -> str:
        """Where it is."""
        return self.home.join(self.name).path

    def at(self, path: str) -> Location:
        """Return the location of one of its files, of which is known what it is."""
        return _known(self.home.at(self.files[path].file), self.files[path])

    @property
    def is_files(self) -> bool:
        """Whether it has no directory of its own."""
        return self.name in self.files


class Run(NamedTuple):
    """The steps in the directory of a run, the oldest first.

    `pointers` are the files, and `links` the symbolic links, that name a step: {name: step}, "" for one that is not
    there. `links` are no steps themselves.
    """

    place: Location
    steps: tuple[Step, ...]
    pointers: Mapping[str, str]
    links: Mapping[str, str]

    @property
    def named(self) -> set[str]:
        """The steps that anything names."""
        return {*self.pointers.values(), *self.links.values()} - {""}


def run_at(place: Location) -> Run:
    """Return the run in a directory. Raise UsageError if it has no steps."""
    # On a store, the listing alone tells that it is a directory.
    is_listed = is_remote(place.path) and bool(place.names)
    if not is_listed and place.kind == "missing":
        raise MissingError(f"{place} does not exist.")
    if not is_listed and place.kind != "directory":
        raise UsageError(f"{place} is {place.entry.described}, where the directory of a run was expected.")
    inner = [place.child(name) for name in _FOLDERS if name in place.names and place.names[name].kind == "directory"]
    for directory in (place, *inner):
        run = _run_in(directory)
        if run.steps:
            return run
    advice = "Name the directory that the steps are in."
    if _is_checkpoint(place):
        raise UsageError(f"{place} is one step of a run, where the directory of the run was expected.", advice)
    raise UsageError(f"{place} has no steps: no directory or file in it has the number of a step in its name.", advice)


def _run_in(place: Location) -> Run:
    there = dict(place.names)
    links = {name: _target(place, name) for name in there if _is_link(place, name)}
    for name in links:
        del there[name]
    steps = [*_directories(place, there), *_files(place, there)]
    steps.sort(key=lambda step: (-1 if step.number is None else step.number, step.time or 0, step.name))
    names = {name: step.name for step in steps for name in step.names}
    led = {name: names.get(target, "") for name, target in links.items() if target in names or number_of(name) is None}
    return Run(place, tuple(steps), _pointers(place, there, names), led)


def number_of(name: str) -> int | None:
    """Return the number of a step that a name tells; None if it tells none.

    >>> [number_of(name) for name in ("epoch=3-step=100.ckpt", "global_step20", "0300", "llama-7b")]
    [100, 20, 300, None]
    """
    plain = name.lower()
    if plain.isdecimal() and plain.isascii() and len(plain) <= 18:
        return int(plain)
    found = [(match[1], int(match[2])) for match in _NUMBER.finditer(plain)]
    for words in _WORDS:
        numbers = [number for word, number in found if word in words or word.endswith(words[0])]
        if numbers:
            return numbers[-1]
    return None


def _directories(place: Location, there: Mapping[str, Entry]) -> Iterator[Step]:
    for name, entry in there.items():
        if entry.kind != "directory" or (name.startswith(".") and not _UNFINISHED.fullmatch(name)):
            continue
        inner, number = _inside(place, name), number_of(name)
        if number is None and not is_tag_directory(_listed(inner)[0]):
            continue
        found = _Contents()
        found.add(inner, name, _DEEPEST)
        described = [path for path in found.files if path.endswith(_DESCRIBED)]
        outer = [path for path in described if path.count("/") == 1]
        taken = place.at(found.files[outer[0]].file) if len(outer) == 1 else inner
        made_here = bool(described) or any(f"/{HIDDEN}" in path for path in found.files)
        is_unfinished = _UNFINISHED.fullmatch(name) is not None
        yield Step(
            name, number, place, taken, found.files, tuple(found.links), is_unfinished, found.unlisted, made_here
        )


def _without(path: str, own: re.Pattern[str], number: int) -> str:
    """Return a path with # in the place of the number of its step."""
    return "/".join(own.sub("#", name) if number_of(name) == number else name for name in path.split("/"))


def _inside(place: Location, name: str) -> Location:
    """Return a directory in `place`."""
    return _known(place.child(name), place.names[name])


def _known(place: Location, entry: Entry) -> Location:
    """Return a location, of which a listing has told what it is: a store is not asked again."""
    vars(place).setdefault("entry", entry)
    return place


def _listed(place: Location) -> tuple[Mapping[str, Entry], str]:
    """Return what is in a directory, and why a local one, such as another user's, cannot be listed."""
    try:
        return place.names, ""
    except FailedError as error:
        if is_remote(place.path):
            raise
        return {}, error.message


class _Contents:
    """What is in the directory of a step: its files and symbolic links by their paths in the run, and why a directory
    in it could not be listed."""

    def __init__(self) -> None:
        self.files: dict[str, Entry] = {}
        self.links: list[str] = []
        self.unlisted = ""

    def add(self, place: Location, path: str, deepest: int) -> None:
        """Add what is in and below the directory `place`, whose path in the run is `path`. Links to directories are not
        followed."""
        names, why = _listed(place)
        self.unlisted = self.unlisted or why
        for name, entry in names.items():
            inner = f"{path}/{name}"
            if entry.kind in ("directory", "missing") and _is_link(place, name):
                self.links.append(inner)
            elif entry.kind == "directory" and deepest:
                self.add(_inside(place, name), inner, deepest - 1)
            else:
                self.files[inner] = entry
            if len(self.files) > _MOST:
                raise LimitError(f"{place} has more than {_MOST:,} files.")


def _files(place: Location, there: Mapping[str, Entry]) -> Iterator[Step]:
    """Yield the steps that are files: each is one, or several if their names say that they hold parts of it."""
    candidates = [
        name
        for name, entry in there.items()
        if entry.kind == "file" and _stem(name) != name and not re.search(rf"{NUMBERED}\.", name)
    ]
    shapes = Counter(_DIGITS.sub("#", name) for name in candidates)
    told = {name: number_of(_stem(name)) for name in candidates}
    plain = {
        name: int(digits[-1])
        for name in candidates
        if told[name] is None and parsed(name) is None and (digits := re.findall(r"\d{1,18}", _stem(name)))
    }
    # In the directory of a step, a number without a word for a step is that of a rank.
    if plain and (_OF_STEP.fullmatch(place.name) or _is_checkpoint(place, plain)):
        plain = {}
    # Without a word for a step, a number is one if several names differ in it, or if a step has it.
    several = {number for name, number in plain.items() if shapes[_DIGITS.sub("#", name)] > 1}
    known = several | {number for number in told.values() if number is not None}
    by_number: dict[int, list[str]] = {}
    for name in candidates:
        number = told[name] if told[name] is not None else plain.get(name)
        if number is not None and number in known:
            by_number.setdefault(number, []).append(name)
    for number, names in by_number.items():
        parts = any(is_beside_weights(name) or parsed(name) is not None for name in names)
        for group in [names] if parts else [[name] for name in names]:
            first = min(group, key=lambda name: (is_beside_weights(name), name))
            files = {name: there[name] for name in group}
            unfinished = any(map(_UNFINISHED.fullmatch, group))
            taken = _known(place.at(there[first].file), there[first])
            yield Step(first, number, place, taken, files, (), unfinished)


def _is_checkpoint(place: Location, numbered: Collection[str] = ()) -> bool:
    """Whether the directory `place` is a checkpoint itself. Models in the files `numbered` alone make it none: each may
    be a step."""
    if is_tag_directory(place.names):
        return True
    try:
        chosen, _ = choose(Probe(place))
    except (CorruptError, UnsupportedError, UsageError):
        return False
    return not numbered or chosen.FAMILY != SAFETENSORS or holds_whole(place.names.keys() - numbered)


def is_beside_weights(path: str) -> bool:
    """Whether a file holds an optimizer's states, or something else than weights, by its name."""
    return FileSet(_stem(path.rpartition("/")[2]), None).kind != MODEL


def _stem(name: str) -> str:
    """Return a name without the suffix of a checkpoint, and what may stand behind that while it is written."""
    match = _of_file().fullmatch(name)
    return match[1] if match else name


@functools.cache
def _of_file() -> re.Pattern[str]:
    suffixes = "|".join(map(re.escape, SUFFIXES))
    return re.compile(rf"(.+?)(?:{suffixes})(?:\.(?:tmp|part|partial|incomplete).*)?")


def _pointers(place: Location, there: Mapping[str, Entry], names: Mapping[str, str]) -> dict[str, str]:
    """Return the step that each file names which says where a checkpoint is."""
    found: dict[str, str] = {}
    for name in POINTERS:
        if name not in there or there[name].kind != "file":
            continue
        if name in (LATEST, LATEST_UNIVERSAL):
            told = place.join(name).read_text(MAX_TAG).strip()
            found[name] = names.get(told, "")
        else:
            pointed = runs.pointed(place)
            found[name] = names.get(pointed[0].name, "") if pointed and pointed[1].name == name else ""
    return found


def _is_link(place: Location, name: str) -> bool:
    return not is_remote(place.path) and os.path.islink(os.path.join(place.path, name))


def _target(place: Location, name: str) -> str:
    """Return the name in the same directory that a link leads to; "" if it leads elsewhere."""
    leads = os.path.join(place.path, os.readlink(os.path.join(place.path, name)))
    directory, target = os.path.split(os.path.normpath(leads))
    return target if directory == os.path.normpath(place.path) else ""
