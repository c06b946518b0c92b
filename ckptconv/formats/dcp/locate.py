"""Where a torch.distributed.checkpoint directory is, by its name, its neighbours and the names in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptconv.errors import UsageError
from ckptconv.formats.format import CERTAIN, POSSIBLE, Guess, Probe
from ckptconv.formats.source import Source, Wanted
from ckptconv.storage.files import Entry
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, dirname

FAMILY = "dcp"
GUESS = Guess(CERTAIN, "a checkpoint of torch.distributed.checkpoint", "dcp2safetensors {} OUTPUT")
METADATA = ".metadata"
# What it begins with, after a few bytes.
_CLASS = b"torch.distributed.checkpoint.metadata"
SUFFIX = ".distcp"
RANK = re.compile(r"__(\d{1,9})\.metadata")
SHARD = re.compile(r"shard-(\d{5})-.*\.safetensors")
# Where HuggingFaceStorageWriter puts the shards of which it made an ordinary set.
SHARDED = "sharded"
# What frameworks call the directory of a model beside that of an optimizer, or other things of a step.
_MODELS = re.compile(r"pytorch_model_fsdp_\d+|model_and_optim|model|checkpoint|dcp|sharded")
_OPTIMIZERS = re.compile(r"optimizer_\d+|optimizer|optim")
_STEP = re.compile(r"(?:step|global_step|checkpoint|iter|epoch)?[-_=]?(\d+)")
# How deep a checkpoint may lie below the directory that is named: a run's step's model.
LEVELS = 2
# So much of a file tells whether it is metadata.
BEGINNING = 64


@dataclass(frozen=True)
class Located:
    """A directory that holds a checkpoint, that of its optimizer where it is another, and why this was taken."""

    directory: Location
    optimizer: Location | None = None
    note: str = ""


def sniff(probe: Probe) -> Guess | None:
    """A file that describes a checkpoint stands for the directory that it is in."""
    place = probe.place
    if probe.is_file:
        if is_part(place.path):
            return GUESS._replace(place=place.at(directory_of(place.path)))
        # An index is JSON, and need not be looked into.
        if not place.path.endswith(".index.json") and is_metadata(probe.head[0]):
            raise UsageError(
                f"{place} is the {METADATA} of a checkpoint of torch.distributed.checkpoint, under another name.",
                f"Rename it to {METADATA}, beside the {SUFFIX} files, and name the directory.",
            )
        return None
    is_expected = probe.expected == FAMILY
    if probe.is_directory and (is_directory(place.names) or (is_expected and locate(place))):
        return GUESS
    return GUESS._replace(sure=POSSIBLE) if is_expected else None


def read(place: Location, wanted: Wanted) -> Source:
    """Open a checkpoint by its directory, or the one that a framework put it in."""
    from ckptconv.formats.dcp import read as dcp

    return dcp.read(place, wanted)


def is_part(path: str) -> bool:
    """Whether a file of this name is a part of a checkpoint, and no checkpoint itself."""
    name = basename(path)
    return name == METADATA or name.endswith(SUFFIX) or RANK.fullmatch(name) is not None


def is_metadata(head: bytes) -> bool:
    """Whether a file that begins with `head` is metadata, whatever its name: torch's class for it is the first that its
    pickle names."""
    return head[:1] == b"\x80" and _CLASS in head[:BEGINNING]


def directory_of(path: str) -> str:
    """The directory of the checkpoint that a file is a part of, where that file stands for all of it.

    Raises UsageError for a file of one rank's tensors.
    """
    if path.endswith(SUFFIX):
        raise UsageError(
            f"{path} is a part of a checkpoint: archives of the tensors that one rank saved, one after the other. What "
            f"they are and how they fit together is told by the {METADATA} beside it.",
            f"Name the directory: ckptconv dcp2safetensors {dirname(path)} OUTPUT",
        )
    return dirname(path)


def is_directory(names: Mapping[str, Entry]) -> bool:
    """Whether a directory with these names holds a checkpoint, be it whole or not."""
    return any(
        entry.kind == "file" and (is_part(name) or name == f"{METADATA}.tmp" or SHARD.fullmatch(name))
        for name, entry in names.items()
    )


def locate(place: Location, levels: int = LEVELS) -> Located | None:
    """The checkpoint in a directory: itself, or what frameworks put below, as deep as `levels`. None if there is none.

    Raises UsageError where there are several, and nothing tells which is meant.
    """
    if is_directory(place.names):
        return Located(place)
    names = [name for name, entry in place.names.items() if entry.kind == "directory" and not name.startswith(".")]
    steps = {int(match[1]): name for name in names if (match := _STEP.fullmatch(name))}
    if not levels or not (steps or any(map(_is_known, names))):
        return None
    inner = {name: place.join(name) for name in names}
    found = {name: inner[name] for name in names if _is_known(name) and is_directory(inner[name].names)}
    optimizers = [name for name in found if _OPTIMIZERS.fullmatch(name)]
    models = [name for name in found if name not in optimizers]
    if len(models) > 1 and SHARDED in models:
        models.remove(SHARDED)
    if len(models) > 1 or (not models and len(optimizers) > 1):
        raise UsageError(f"{place} holds several checkpoints: {', '.join(sorted(found))}.", "Name one of them.")
    if models:
        return Located(found[models[0]], found[optimizers[0]] if len(optimizers) == 1 else None)
    if optimizers:
        return Located(found[optimizers[0]])
    for step in sorted(steps, reverse=True):
        below = locate(inner[steps[step]], levels - 1)
        if below is not None:
            why = f", the last of {len(steps)} that are there" if len(steps) > 1 else ""
            return Located(below.directory, below.optimizer, f"Took {steps[step]}{why}.")
    return None


def _is_known(name: str) -> bool:
    return bool(_MODELS.fullmatch(name) or _OPTIMIZERS.fullmatch(name))
