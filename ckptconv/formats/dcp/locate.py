"""Where a torch.distributed.checkpoint directory is, by its name, its neighbours and the names in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptconv.errors import UsageError
from ckptconv.storage.files import Entry, Options, listing
from ckptconv.storage.paths import basename, dirname, join

FAMILY = "dcp"
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
_LEVELS = 2
# So much of a file tells whether it is metadata.
BEGINNING = 64


@dataclass(frozen=True)
class Located:
    """A directory that holds a checkpoint, that of its optimizer where it is another, and why this was taken."""

    directory: str
    optimizer: str = ""
    note: str = ""


def is_part(path: str) -> bool:
    """Whether a file of this name is a part of a checkpoint, and no checkpoint itself."""
    name = basename(path)
    return name == METADATA or name.endswith(SUFFIX) or RANK.fullmatch(name) is not None


def is_metadata(head: bytes) -> bool:
    """Whether a file that begins with `head`, BEGINNING bytes, is metadata, whatever its name: torch's class for it is
    the first that its pickle names."""
    return head[:1] == b"\x80" and _CLASS in head


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


def locate(path: str, names: Mapping[str, Entry], options: Options | None = None) -> Located | None:
    """The checkpoint in a directory with these names: itself, or what frameworks put below. None if there is none.

    Raises UsageError where there are several, and nothing tells which is meant.
    """
    return _locate(path, names, options, _LEVELS)


def _locate(path: str, names: Mapping[str, Entry], options: Options | None, levels: int) -> Located | None:
    if is_directory(names):
        return Located(path)
    inner = {name: entry for name, entry in names.items() if entry.kind == "directory" and not name.startswith(".")}
    steps = {int(match[1]): name for name in inner if (match := _STEP.fullmatch(name))}
    if not levels or not (steps or any(map(_is_known, inner))):
        return None
    found = {name: join(path, name) for name in inner if _is_known(name) and is_directory(_names(path, name, options))}
    optimizers = [name for name in found if _OPTIMIZERS.fullmatch(name)]
    models = [name for name in found if name not in optimizers]
    if len(models) > 1 and SHARDED in models:
        models.remove(SHARDED)
    if len(models) > 1 or (not models and len(optimizers) > 1):
        raise UsageError(f"{path} holds several checkpoints: {', '.join(sorted(found))}.", "Name one of them.")
    if models:
        optimizer = found[optimizers[0]] if len(optimizers) == 1 else ""
        return Located(found[models[0]], optimizer)
    if optimizers:
        return Located(found[optimizers[0]])
    for step in sorted(steps, reverse=True):
        below = join(path, steps[step])
        place = _locate(below, _names(path, steps[step], options), options, levels - 1)
        if place is not None:
            why = f", the last of {len(steps)} that are there" if len(steps) > 1 else ""
            return Located(place.directory, place.optimizer, f"Took {steps[step]}{why}.")
    return None


def _is_known(name: str) -> bool:
    return bool(_MODELS.fullmatch(name) or _OPTIMIZERS.fullmatch(name))


def _names(path: str, name: str, options: Options | None) -> dict[str, Entry]:
    return listing(join(path, name), options)
