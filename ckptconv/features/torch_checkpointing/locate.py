"""Finds a step of torch_checkpointing, and its files.

A step has `metadata.pkl` if its library can reshard it. Without that, its files are named after item and rank:
`model_0.pt`, `optimizer_0.pt`, `train_0.json`. Any file may hold an item, also one file for all ranks: `config.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptconv.errors import CorruptError
from ckptconv.features.joining import run_layout
from ckptconv.features.joining.sets import is_distributed, parsed
from ckptconv.formats import model_files
from ckptconv.formats.format import CERTAIN, Guess, Probe
from ckptconv.formats.model_files import may_lie_below
from ckptconv.formats.run_names import STEP_MANIFEST, STEP_METADATA
from ckptconv.formats.source import MODEL_KEYS
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.location import Location

FAMILY = model_files.TORCH
GUESS = Guess(CERTAIN, "a torch_checkpointing step", "pt2safetensors {}", also=("dcp",))
MANIFEST = STEP_MANIFEST
# Names in a complete step.
MARKERS = (MANIFEST,)
# The serializations of an item.
TORCH, SAFETENSORS, JSON, RAW = (f"{kind}Serialization" for kind in ("Torch", "Safetensors", "Json", "Raw"))
# The prefix of a step's name while it is written.
_UNFINISHED = "tmp_"
_STEP = re.compile(r"(?:tmp_)?step[-_]\d{1,18}")
# Words near the beginning of metadata.
_WORDS = (b"nested_path_to_metadata", b"sharding_metadata")
_BEGINNING = 4096
# The name of a file of an item and rank, and that of a rank's directory.
_FILE = re.compile(r"(.+?)[-_.](?:rank[-_.]?)?(\d{1,6})(\.[A-Za-z][A-Za-z0-9]*)")
_RANK = re.compile(r"rank[-_]?(\d{1,6})")
_KINDS = {".safetensors": SAFETENSORS, ".json": JSON, **dict.fromkeys((".pt", ".pth", ".ckpt"), TORCH)}


class ItemFile(NamedTuple):
    """A file of a step: its path in the directory, and its serialization."""

    path: str
    kind: str


@dataclass
class Item:
    """The files of an item, by rank. A file for all ranks is `shared`, and counts as that of rank 0."""

    files: dict[int, ItemFile] = field(default_factory=dict)
    shared: bool = False

    @property
    def has_tensors(self) -> bool:
        """Whether the item's files may hold tensors."""
        return any(file.kind in (TORCH, SAFETENSORS) for file in self.files.values())


def sniff(probe: Probe) -> Guess | None:
    """Recognize the directory of a step, or its metadata."""
    place = probe.place
    if probe.is_file:
        is_metadata = place.name == STEP_METADATA and _is_metadata(probe.head[0])
        return GUESS._replace(place=place.parent) if is_metadata else None
    return GUESS if probe.is_directory and is_step(place) else None


def locate(place: Location) -> run_layout.Located | None:
    """Return the step in a directory, or below it; None if there is none. See `run_layout.locate`."""
    return run_layout.locate(place, is_step)


def sniff_below(probe: Probe) -> Guess | None:
    """Recognize the directory of a run or of a step with a checkpoint in it, or below it."""
    return GUESS if may_lie_below(probe, FAMILY) and holds_below(probe.place) else None


def holds_below(place: Location) -> bool:
    """Return whether a step is in a directory, or below it."""
    return locate(place) is not None


def is_step(place: Location) -> bool:
    """Return whether a directory is a step: by its metadata, or by the names in it."""
    names = place.names
    if (
        STEP_METADATA in names
        and names[STEP_METADATA].kind == "file"
        and _is_metadata(_head(place.at(names[STEP_METADATA].file)))
    ):
        return True
    if ".metadata" in names or not any(map(_parsed, _paths(place))):
        return False  # the first is a step of torch.distributed.checkpoint
    items = [item for item in items_of(place).values() if not item.shared]
    with_tensors = [item for item in items if item.has_tensors]
    numbered = {file.path for item in with_tensors for file in item.files.values()}
    if not with_tensors or model_files.holds_whole(names.keys() - numbered):
        return False
    if _STEP.fullmatch(place.name):
        return True
    every = [item.files.keys() for item in items]
    if len(items) < 2 or any(ranks != every[0] for ranks in every) or 0 not in every[0]:
        return False
    if len(every[0]) == 1:
        return any(f"{word}_0.pt" in names for word in MODEL_KEYS)
    return is_distributed(place.join(with_tensors[0].files[0].path))


def _head(file: Location) -> bytes:
    with file.open_reader() as reader:
        return reader.read_at(0, min(reader.file.size, _BEGINNING))


def _is_metadata(head: bytes) -> bool:
    return head[:1] == b"\x80" and any(word in head for word in _WORDS)


def check_finished(place: Location) -> None:
    """Raise CorruptError for a directory in which a step is written before it is complete."""
    if place.name.startswith(_UNFINISHED):
        raise CorruptError(
            f"{place} was not finished: the directory of a step is called {_UNFINISHED}… until all ranks have written "
            "their files.",
            "Give another step.",
        )


def items_of(
    place: Location, described: Mapping[str, Mapping[int, ItemFile | None]] | None = None, world: int = 0
) -> dict[str, Item]:
    """Return the items in the directory of a step, by name, with the files that exist. `described` are the files of
    each item by the step's metadata, None for the default file, and `world` is the number of ranks that wrote it.
    Without metadata, both follow from the names of the files."""
    items: dict[str, Item] = {}
    used = {STEP_METADATA, MANIFEST}
    for name, files in (described or {}).items():
        item = items[name] = Item()
        for rank, file in files.items():
            file = file or ItemFile(f"{name}_{rank}.pt", TORCH)
            used.add(file.path)
            if place.has_file(file.path):
                item.files[rank] = file
    numbered: dict[tuple[str, str], dict[int, str]] = {}
    alone: list[str] = []
    for path in _paths(place):
        parts = _parsed(path) if path not in used and path.rpartition("/")[2] not in used else None
        if parts is not None:
            stem, rank, suffix = parts
            numbered.setdefault((stem, suffix), {})[rank] = path
        elif path not in used:
            alone.append(path)
    kinds = {key: _kind(place, min(paths.items())[1]) for key, paths in numbered.items()}
    worlds = [max(numbered[key]) + 1 for key, kind in kinds.items() if kind in (TORCH, SAFETENSORS)]
    world = max(worlds, default=0) if described is None else world
    for (stem, suffix), paths in numbered.items():
        kind = kinds[stem, suffix]
        if kind in (TORCH, SAFETENSORS) or (0 in paths and max(paths) < world):
            _add(items, stem, suffix, Item({rank: ItemFile(path, kind) for rank, path in sorted(paths.items())}))
        else:
            alone += paths.values()
    for path in alone:
        stem, dot, suffix = path.rpartition(".")
        _add(items, stem or path, dot + suffix, Item({0: ItemFile(path, _kind(place, path))}, shared=True))
    return items


def _add(items: dict[str, Item], name: str, suffix: str, item: Item) -> None:
    """Add an item under its name, or, if another has that name, under its name with suffix."""
    items[f"{name}{suffix}" if name in items else name] = item


def _paths(place: Location) -> Iterable[str]:
    """Yield the paths of the files in a directory, and in those of ranks in it."""
    for name, entry in place.names.items():
        if entry.kind == "file" and not name.startswith("."):
            yield name
        elif entry.kind == "directory" and _RANK.fullmatch(name):
            yield from (f"{name}/{inner}" for inner, item in place.child(name).names.items() if item.kind == "file")


def _parsed(path: str) -> tuple[str, int, str] | None:
    """Return the item, the rank and the suffix in the path of a file.

    >>> _parsed("model_12.pt"), _parsed("rank_3/model.pt"), _parsed("config.json")
    (('model', 12, '.pt'), ('model', 3, '.pt'), None)
    """
    directory, _, name = path.rpartition("/")
    rank = _RANK.fullmatch(directory)
    parts = _FILE.fullmatch(name)
    if rank:
        stem, dot, suffix = (parts[1], "", parts[3]) if parts and parts[2] == rank[1] else name.rpartition(".")
        return stem or name, int(rank[1]), dot + suffix
    return None if parts is None or parsed(name) else (parts[1], int(parts[2]), parts[3])


def _kind(place: Location, path: str) -> str:
    """Return the serialization of a file that no metadata mentions: by its suffix, or its first bytes."""
    kind = _KINDS.get(f".{path.rpartition('.')[2]}")
    if kind is None:
        kind = TORCH if _head(place.join(path)).startswith(LOCAL_SIGNATURE) else RAW
    return kind
