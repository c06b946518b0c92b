"""Find a step of torch_checkpointing, and its files.

A step has `metadata.pkl` if its library can reshard it. Without that, its files are named for item and rank:
`model_0.pt`, `optimizer_0.pt`, `train_0.json`. An item may be in any file, and in one for all ranks: `config.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptconv.errors import CorruptError
from ckptconv.formats import model_files, runs
from ckptconv.formats.format import CERTAIN, Guess, Probe
from ckptconv.formats.joining.sets import parsed
from ckptconv.formats.model_files import may_lie_below
from ckptconv.formats.runs import STEP_MANIFEST, STEP_METADATA
from ckptconv.formats.source import MODEL_KEYS
from ckptconv.formats.torch import file as torch_file
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.location import Location

FAMILY = model_files.TORCH
GUESS = Guess(CERTAIN, "a step of torch_checkpointing", "pt2safetensors {}", also=("dcp",))
MANIFEST = STEP_MANIFEST
# How an item is written.
TORCH, SAFETENSORS, JSON, RAW = (f"{kind}Serialization" for kind in ("Torch", "Safetensors", "Json", "Raw"))
# What a step is called while it is written.
_UNFINISHED = "tmp_"
_STEP = re.compile(r"(?:tmp_)?step[-_]\d{1,18}")
# What metadata says near its beginning.
_WORDS = (b"nested_path_to_metadata", b"sharding_metadata")
_BEGINNING = 4096
# A file of an item and rank, and a directory of a rank.
_FILE = re.compile(r"(.+?)[-_.](?:rank[-_.]?)?(\d{1,6})(\.[A-Za-z][A-Za-z0-9]*)")
_RANK = re.compile(r"rank[-_]?(\d{1,6})")
_KINDS = {".safetensors": SAFETENSORS, ".json": JSON, **dict.fromkeys((".pt", ".pth", ".ckpt"), TORCH)}


class Held(NamedTuple):
    """A file of a step: its path in the directory, and how it is written."""

    path: str
    kind: str


@dataclass
class Item:
    """The files of an item, by rank. One that is for all ranks is `shared`, and that of rank 0."""

    files: dict[int, Held] = field(default_factory=dict)
    shared: bool = False

    @property
    def has_tensors(self) -> bool:
        """Whether its files may hold tensors."""
        return any(held.kind in (TORCH, SAFETENSORS) for held in self.files.values())


def sniff(probe: Probe) -> Guess | None:
    """Recognize the directory of a step, or its metadata."""
    place = probe.place
    if probe.is_file:
        is_metadata = place.name == STEP_METADATA and _is_metadata(probe.head[0])
        return GUESS._replace(place=place.parent) if is_metadata else None
    return GUESS if probe.is_directory and is_step(place) else None


def locate(place: Location) -> runs.Located | None:
    """Return the step in a directory, or below it; None if there is none. See `runs.locate`."""
    return runs.locate(place, is_step)


def sniff_below(probe: Probe) -> Guess | None:
    """Recognize the directory of a run or of a step with a checkpoint in it, or below."""
    return GUESS if may_lie_below(probe, FAMILY) and holds_below(probe.place) else None


def holds_below(place: Location) -> bool:
    """Whether there is a step in a directory, or below it."""
    return locate(place) is not None


def is_step(place: Location) -> bool:
    """Whether a directory is a step: by its metadata, or by its names."""
    names = place.names
    if (
        STEP_METADATA in names
        and names[STEP_METADATA].kind == "file"
        and _is_metadata(_head(place.at(names[STEP_METADATA].file)))
    ):
        return True
    items = [item for item in items_of(place).values() if not item.shared]
    held = [item for item in items if item.has_tensors]
    numbered = {file.path for item in held for file in item.files.values()}
    if not held or model_files.holds_whole(names.keys() - numbered):
        return False
    if _STEP.fullmatch(place.name):
        return True
    every = [item.files.keys() for item in items]
    if len(items) < 2 or any(ranks != every[0] for ranks in every) or 0 not in every[0]:
        return False
    if len(every[0]) == 1:
        return any(f"{word}_0.pt" in names for word in MODEL_KEYS)
    return torch_file.is_distributed(place.join(held[0].files[0].path))


def _head(file: Location) -> bytes:
    with file.open_reader() as reader:
        return reader.read_at(0, min(reader.file.size, _BEGINNING))


def _is_metadata(head: bytes) -> bool:
    return head[:1] == b"\x80" and any(word in head for word in _WORDS)


def check_finished(place: Location) -> None:
    """Raise CorruptError for a directory that a step is written to before it is complete."""
    if place.name.startswith(_UNFINISHED):
        raise CorruptError(
            f"{place} was not finished: a step is called {_UNFINISHED}… until the files of all ranks are written.",
            "Take another step.",
        )


def items_of(
    place: Location, described: Mapping[str, Mapping[int, Held | None]] | None = None, world: int = 0
) -> dict[str, Item]:
    """Return the items in the directory of a step, by name, with the files that are there. What its metadata says are
    the files of each item as `described`, None for the default one, and how many ranks wrote it, `world`; else both are
    as the names of the files say."""
    items: dict[str, Item] = {}
    used = {STEP_METADATA, MANIFEST}
    for name, files in (described or {}).items():
        found = items[name] = Item()
        for rank, held in files.items():
            held = held or Held(f"{name}_{rank}.pt", TORCH)
            used.add(held.path)
            if place.has_file(held.path):
                found.files[rank] = held
    numbered: dict[tuple[str, str], dict[int, str]] = {}
    alone: list[str] = []
    for path in _paths(place):
        told = _parsed(path) if path not in used and path.rpartition("/")[2] not in used else None
        if told is not None:
            stem, rank, suffix = told
            numbered.setdefault((stem, suffix), {})[rank] = path
        elif path not in used:
            alone.append(path)
    kinds = {key: _kind(place, min(paths.items())[1]) for key, paths in numbered.items()}
    worlds = [max(numbered[key]) + 1 for key, kind in kinds.items() if kind in (TORCH, SAFETENSORS)]
    world = max(worlds, default=0) if described is None else world
    for (stem, suffix), paths in numbered.items():
        kind = kinds[stem, suffix]
        if kind in (TORCH, SAFETENSORS) or (0 in paths and max(paths) < world):
            _add(items, stem, suffix, Item({rank: Held(path, kind) for rank, path in sorted(paths.items())}))
        else:
            alone += paths.values()
    for path in alone:
        stem, dot, suffix = path.rpartition(".")
        _add(items, stem or path, dot + suffix, Item({0: Held(path, _kind(place, path))}, shared=True))
    return items


def _add(items: dict[str, Item], name: str, suffix: str, item: Item) -> None:
    """Add an item under its name; with its suffix if there is another of that name."""
    items[f"{name}{suffix}" if name in items else name] = item


def _paths(place: Location) -> Iterable[str]:
    """Yield the paths of the files in a directory, and in those of ranks in it."""
    for name, entry in place.names.items():
        if entry.kind == "file" and not name.startswith("."):
            yield name
        elif entry.kind == "directory" and _RANK.fullmatch(name):
            yield from (f"{name}/{inner}" for inner, each in place.child(name).names.items() if each.kind == "file")


def _parsed(path: str) -> tuple[str, int, str] | None:
    """Return the item, the rank and the suffix that the path of a file tells.

    >>> _parsed("model_12.pt"), _parsed("rank_3/model.pt"), _parsed("config.json")
    (('model', 12, '.pt'), ('model', 3, '.pt'), None)
    """
    directory, _, name = path.rpartition("/")
    rank = _RANK.fullmatch(directory)
    told = _FILE.fullmatch(name)
    if rank:
        stem, dot, suffix = (told[1], "", told[3]) if told and told[2] == rank[1] else name.rpartition(".")
        return stem or name, int(rank[1]), dot + suffix
    return None if told is None or parsed(name) else (told[1], int(told[2]), told[3])


def _kind(place: Location, path: str) -> str:
    """Return how a file is written that no metadata speaks of: by its suffix, or its beginning."""
    kind = _KINDS.get(f".{path.rpartition('.')[2]}")
    if kind is None:
        kind = TORCH if _head(place.join(path)).startswith(LOCAL_SIGNATURE) else RAW
    return kind
