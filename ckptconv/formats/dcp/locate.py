"""Find a torch.distributed.checkpoint directory, by its name, its neighbours and the names in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptconv.errors import CorruptError, UsageError
from ckptconv.formats.format import CERTAIN, POSSIBLE, Guess, Probe
from ckptconv.formats.source import Source, Wanted
from ckptconv.storage.files import Entry
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, dirname
from ckptconv.text import some

FAMILY = "dcp"
MEGATRON = "torch_dist checkpoint of Megatron-core"
GUESS = Guess(CERTAIN, "a checkpoint of torch.distributed.checkpoint", "dcp2safetensors {} OUTPUT")
METADATA = ".metadata"
# The class that `.metadata` names after its first few bytes.
_CLASS = b"torch.distributed.checkpoint.metadata"
SUFFIX = ".distcp"
RANK = re.compile(r"__(\d{1,9})\.metadata")
SHARD = re.compile(r"shard-(\d{5})-.*\.safetensors")
# Where HuggingFaceStorageWriter puts the shards that it consolidates into an ordinary set.
SHARDED = "sharded"
# Names that frameworks give the directory of a model; of an optimizer beside it; of a training step.
_MODELS = re.compile(
    r"pytorch_model_fsdp_\d+|model_and_optim|model|checkpoint|dcp|sharded|dist_ckpt|(?:model_)?weights"
)
_OPTIMIZERS = re.compile(r"optimizer_\d+|optimizer|optim")
_STEP = re.compile(r"(?:step|global_step|checkpoint|iter|epoch)?[-_=]?(\d+)")
# Megatron's file that says which step is the last: a number, or `release` for weights without a training.
LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_LONGEST_LATEST = 64
# Names that NeMo and verl give the directory of a model's files, the first first. A critic is another model.
_HOLDERS = ("actor", "policy", "weights", "model", "dist_ckpt", RELEASE)
# How deep a checkpoint may lie below the named directory: run, step, actor, model.
LEVELS = 4
# Bytes of a file that tell whether it is metadata.
BEGINNING = 64


@dataclass(frozen=True)
class Located:
    """A checkpoint's directory, that of its optimizer if it is another, and a note of why this one was taken.

    `pointers` are the paths of files that said so.
    """

    directory: Location
    optimizer: Location | None = None
    note: str = ""
    pointers: tuple[str, ...] = ()


def sniff(probe: Probe) -> Guess | None:
    """Recognize a directory, or a file that describes the checkpoint in its directory."""
    place = probe.place
    if probe.is_file:
        if is_part(place.path):
            return GUESS._replace(place=place.at(directory_of(place.path)))
        # An index is JSON: do not read it.
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
    """Open a checkpoint by its directory, or by a directory above it."""
    from ckptconv.formats.dcp import read as dcp

    return dcp.read(place, wanted)


def is_part(path: str) -> bool:
    """Whether a file of this name is part of a checkpoint rather than a checkpoint."""
    name = basename(path)
    return name == METADATA or name.endswith(SUFFIX) or RANK.fullmatch(name) is not None


def is_metadata(head: bytes) -> bool:
    """Whether a file that begins with `head` is metadata, whatever its name: its pickle names torch's class for it
    first."""
    return head[:1] == b"\x80" and _CLASS in head[:BEGINNING]


def directory_of(path: str) -> str:
    """Return the directory of the checkpoint that a file is part of, if the file stands for the whole.

    Raise UsageError for a file of one rank's tensors.
    """
    if path.endswith(SUFFIX):
        raise UsageError(
            f"{path} is a part of a checkpoint: archives of the tensors that one rank saved, one after the other. What "
            f"they are and how they fit together is in the {METADATA} beside it.",
            f"Name the directory: ckptconv dcp2safetensors {dirname(path)} OUTPUT",
        )
    return dirname(path)


def is_directory(names: Mapping[str, Entry]) -> bool:
    """Whether a directory with these names holds a checkpoint, complete or not."""
    return any(
        entry.kind == "file" and (is_part(name) or name == f"{METADATA}.tmp" or SHARD.fullmatch(name))
        for name, entry in names.items()
    )


def locate(place: Location, levels: int = LEVELS) -> Located | None:
    """Return the checkpoint in a directory: itself, or one that a framework put at most `levels` below. None if there
    is none.

    Raise UsageError if there are several, and nothing tells which is meant.
    """
    if is_directory(place.names):
        return Located(place)
    names = [name for name, entry in place.names.items() if entry.kind == "directory" and not name.startswith(".")]
    steps = _steps(place)
    if LATEST in place.names and levels:
        return _pointed(place, levels)
    if not levels or not (steps or any(name in _HOLDERS or _is_known(name) for name in names)):
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
            return _below(below, f"Took {steps[step]}{why}.")
    holders = [(name, below) for name in _HOLDERS if name in names and (below := locate(inner[name], levels - 1))]
    return _below(holders[0][1], f"Took {holders[0][0]}.") if holders else None


def _below(found: Located, note: str, *pointers: str) -> Located:
    """Return what was found further below, with the note and pointers of this level before its own."""
    notes = f"{note} {found.note}".rstrip()
    return Located(found.directory, found.optimizer, notes, (*pointers, *found.pointers))


def step_named(place: Location) -> str | None:
    """Return the directory that Megatron's file in a run's directory names, if it is there."""
    latest = place.join(LATEST).read_text(_LONGEST_LATEST).strip()
    if latest == RELEASE:
        return RELEASE if RELEASE in place.names else None
    return _steps(place).get(int(latest)) if re.fullmatch(r"[0-9]{1,18}", latest) else None


def _steps(place: Location) -> dict[int, str]:
    """Return the directories of steps in a directory, by their number."""
    names = [name for name, entry in place.names.items() if entry.kind == "directory"]
    return {int(match[1]): name for name in names if (match := _STEP.fullmatch(name))}


def _pointed(place: Location, levels: int) -> Located | None:
    """Return the checkpoint of the step that Megatron's file in a run's directory names.

    Raise CorruptError if it names none that is there.
    """
    name = step_named(place)
    if name is None:
        there = some([*_steps(place).values()], form=str)
        raise CorruptError(
            f"{place.join(LATEST)} names a step that is not there; there is: {there or 'none'}.",
            "Name the directory of a step.",
        )
    below = locate(place.join(name), levels - 1)
    return _below(below, f"Took {name}, as {LATEST} says.", place.join(LATEST).path) if below else None


def _is_known(name: str) -> bool:
    return bool(_MODELS.fullmatch(name) or _OPTIMIZERS.fullmatch(name))
