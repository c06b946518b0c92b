"""Locate a DeepSpeed checkpoint, and assign its files to ranks. Only names are read.

Source: the file names of every release of DeepSpeed, see `_KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, MissingError, UsageError
from ckptconv.formats.format import CERTAIN, LIKELY, POSSIBLE, Guess, Probe
from ckptconv.formats.model_files import may_lie_below
from ckptconv.formats.registered import DEEPSPEED
from ckptconv.formats.run_names import (
    LATEST,
    LATEST_UNIVERSAL,
    MAX_TAG,
    MODEL_STATES,
    OPTIMIZER_STATES,
    STATES,
    ZERO,
    is_tag_directory,
    tags_in,
)
from ckptconv.storage.inside import check_inside, leads_out
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.storage.reading import Entry
from ckptconv.tensors.moves import File
from ckptconv.text import format_size

FAMILY = DEEPSPEED
GUESS = Guess(CERTAIN, "a DeepSpeed checkpoint", "zero-to-fp32 {} OUTPUT")
# Most checkpoint directories hold this script; its path stands for the directory.
RECOVERY_SCRIPT = "zero_to_fp32.py"

_KINDS = {
    "optim": OPTIMIZER_STATES,
    "model": MODEL_STATES,
    "expert": r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt",
    "layer": r"layer_(?P<layer>\d+)(?:-model_(?P<mp>\d+))?-model_states\.pt",
    "expert_optim": r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt",
}
_FIELDS = {"optim": "optim", "model": "model", "expert": "experts", "layer": "layers", "expert_optim": "expert_optims"}
# The words for a file's numbers in a message if two files have the same.
_RANKS = {
    "optim": "data-parallel rank {dp} of model-parallel rank {mp}",
    "model": "data-parallel rank {dp} of model-parallel rank {mp}",
    "expert": "expert {expert} of layer {layer} of model-parallel rank {mp}",
    "layer": "layer {layer} of tensor-parallel rank {mp}",
    "expert_optim": "expert-parallel rank {ep} of model-parallel rank {mp}",
}


class TagFiles(NamedTuple):
    """The files of one tag, by kind, and the names of all other files.

    The keys are ranks: (data-parallel, model-parallel); of experts (layer, expert, model-parallel); of layers (layer,
    tensor-parallel); of the experts' optimizers, which are used without ZeRO, (expert-parallel, model-parallel).
    """

    directory: str
    optim: Mapping[tuple[int, int], File]
    model: Mapping[tuple[int, int], File]
    experts: Mapping[tuple[int, int, int], File]
    layers: Mapping[tuple[int, int], File]
    expert_optims: Mapping[tuple[int, int], File]
    others: tuple[str, ...]


class TagDirectory(NamedTuple):
    """A tag's directory, why it was taken if it is not the one given, and the file that named it, if any."""

    directory: Location
    reason: str = ""
    pointer: str = ""


def sniff(probe: Probe) -> Guess | None:
    """Recognize a directory; a file, which `torch.load` reads too, only if DeepSpeed is expected."""
    place, is_expected = probe.place, probe.expected == FAMILY
    if probe.is_file:
        # A pattern such as run/* has it beside the steps, of which one would be taken twice.
        if place.name == LATEST and not is_expected and probe.head[0].strip().decode("latin-1") in place.parent.names:
            raise UsageError(
                f"{place} contains only the name of a step.", f"Give the directory of the run, {place.parent.path}."
            )
        return GUESS._replace(sure=LIKELY) if is_expected and is_rank_file(place.name) else None
    if probe.is_directory and (
        {LATEST, LATEST_UNIVERSAL} & set(place.names) or is_tag_directory(place.names) or tags_in(place)
    ):
        return GUESS
    return GUESS._replace(sure=POSSIBLE) if is_expected else None


def sniff_below(probe: Probe) -> Guess | None:
    """Recognize the directory of a run or of a step with a checkpoint in it, or below."""
    return GUESS if may_lie_below(probe) and holds_below(probe.place) else None


def holds_below(place: Location) -> bool:
    """Return whether a directory holds that of one checkpoint, as Lightning writes it."""
    return len(checkpoints_in(place)) == 1


def kind_of(name: str) -> str:
    """Return the kind of a file by its name: "optim", "model", "expert", "layer", "expert_optim"; "" if it has none."""
    what = identity(name)
    return what[0] if what else ""


def is_rank_file(name: str) -> bool:
    """Return whether a file of this name belongs to a DeepSpeed checkpoint."""
    return bool(kind_of(name)) or name in (LATEST, RECOVERY_SCRIPT)


def locate(place: Location, tag: str) -> TagDirectory:
    """Return the tag directory that `place` names: itself, the one that `tag` or `latest` names, that of the given
    file, or that of the only checkpoint in it.

    Raise UsageError, listing what there is, if there is none or several; CorruptError if `latest` names no tag there;
    UnsafeError if it points outside.
    """
    if place.kind == "missing":
        raise MissingError(f"{place} does not exist.")
    if place.kind != "directory":
        if not is_rank_file(place.name):
            raise UsageError(
                f"{place} is a file, but not one that DeepSpeed writes.", "Give the directory that contains `latest`."
            )
        directory = _locate_in(place.parent, tag)
        return directory._replace(reason=directory.reason or f"the directory of {place.name}")
    return _locate_in(place, tag)


def check_tag(path: str, tag: str) -> None:
    """Raise UsageError if `path` is not the directory of `tag`."""
    if tag not in ("", basename(path)):
        raise UsageError(
            f"{path} is the directory of a tag, but --tag specifies the tag {tag!r}.",
            "Give the directory that contains the tags, or leave out --tag.",
        )


def _locate_in(place: Location, tag: str) -> TagDirectory:
    if is_tag_directory(place.names):
        check_tag(place.path, tag)
        return TagDirectory(place)
    if tag:
        _check_tag(tag)
    tags = tags_in(place)
    if tag in tags:
        return TagDirectory(place.child(tag), "the tag from --tag")
    if not tags and LATEST not in place.names:
        return _locate_below(place, tag)
    if tag:
        raise UsageError(f"{place} has no tag {tag!r} with checkpoint files.", _offer(tag, tags))
    if LATEST not in place.names:
        raise UsageError(f"{place} has no file `latest` that specifies the tag to convert.", _offer("", tags))
    where = place.join(LATEST)
    named = where.read_text(MAX_TAG).strip()
    if not named:
        raise CorruptError(
            f"{where} is empty, but should contain the name of a tag: the save was interrupted.", _offer("", tags)
        )
    check_inside(named, where.path, place.path, nested=False)
    if named not in tags:
        raise CorruptError(
            f"{where} contains the tag {named!r}, but no directory of this name with checkpoint files is next to it.",
            _offer(named, tags),
        )
    return TagDirectory(place.child(named), "the tag in `latest`", where.path)


def _locate_below(place: Location, tag: str) -> TagDirectory:
    """Look in a run's directory for its only checkpoint, or the only one that has the tag."""
    below = checkpoints_in(place, tag)
    if len(below) == 1:
        directory = _locate_in(place.child(below[0]), tag)
        return directory._replace(reason=f"{directory.reason}, in the only checkpoint in {place}")
    with_tag = f" with the tag {tag!r}" if tag else ""
    if below:
        raise UsageError(
            f"{place} contains {len(below)} checkpoints{with_tag}, but is not a checkpoint.",
            f"Give one of them: {_shortened(below)}.",
        )
    raise UsageError(
        f"{place} is not a DeepSpeed checkpoint{with_tag}: neither it nor a directory in it contains "
        f"{'this tag' if tag else '`latest`, *_optim_states.pt or *_model_states.pt'}.",
        "Give the directory that was passed to save_checkpoint. For checkpoints of other programs, use ckptconv "
        "convert, without --per-rank.",
    )


def checkpoints_in(place: Location, tag: str = "") -> list[str]:
    """Return the directories in a run's directory that hold `latest`, or the tag `tag`."""
    inner = {name: place.child(name) for name, entry in place.names.items() if entry.kind == "directory"}
    return [name for name, inside in inner.items() if (tag in tags_in(inside) if tag else LATEST in inside.names)]


def _check_tag(tag: str) -> None:
    if leads_out(tag) or "/" in tag or tag == ".":
        raise UsageError(f"--tag specifies {tag!r}, but must be the name of a directory in the run's directory.")


def _offer(wanted: str, tags: list[str]) -> str:
    if not tags:
        return "The directory contains no tags."
    import difflib

    close = difflib.get_close_matches(wanted, _numbered(tags), n=1)
    first = f"Did you mean {close[0]!r}? " if close else ""
    return f"{first}The tags are {_shortened(tags)} (choose one with --tag)."


def _shortened(names: list[str]) -> str:
    """List names in the order of the numbers in them, without the middle of a long list."""
    numbered = _numbered(names)
    return ", ".join(numbered if len(numbered) <= 10 else [*numbered[:4], "…", *numbered[-4:]])


def _numbered(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: [int(part) if part.isdecimal() else 0 for part in re.split(r"(\d+)", name)])


def identity(name: str) -> tuple[str, tuple[int, ...]] | None:
    """Return the kind and the ranks of a file of this name; None if it is not a tag's."""
    for kind, pattern in _KINDS.items() if name.endswith(STATES) else ():
        if match := re.fullmatch(pattern, name):
            numbers = {key: int(value or 0) for key, value in match.groupdict().items()}
            if kind == "expert" and match["layer"] is None:
                numbers["layer"] = -1  # before 0.6.0 one file held an expert of every layer
            return kind, tuple(numbers.values())
    return None


def described(kind: str, rank: tuple[int, ...]) -> str:
    """Describe, for a message, whose file it is."""
    return _RANKS[kind].format(**dict(zip(re.compile(_KINDS[kind]).groupindex, rank, strict=True)))


def files_of(directory: Location, without: Collection[str] = ()) -> TagFiles:
    """Return a tag's files by kind, `without` those names. Raise CorruptError if two files claim the same rank."""
    files_by_kind: dict[str, dict[tuple[int, ...], File]] = {kind: {} for kind in _KINDS}
    others = []
    for name, entry in directory.names.items():
        what = identity(name) if name not in without else None
        if what is None or entry.kind != "file":
            others.append(name)
            continue
        kind, rank = what
        if rank in files_by_kind[kind]:
            other = files_by_kind[kind][rank]
            raise CorruptError(
                f"{directory}: {basename(other.path)} ({format_size(other.size)}) and {name} "
                f"({format_size(entry.file.size)}) are both files of {described(kind, rank)}.",
                "Move the file that belongs to another save to another directory.",
            )
        files_by_kind[kind][rank] = entry.file
    kinds: dict[str, Any] = {_FIELDS[kind]: files for kind, files in files_by_kind.items()}
    return TagFiles(directory.path, **kinds, others=tuple(others))


def locate_universal(place: Location, tag: str) -> Location | None:
    """Return the universal checkpoint that `place` names: itself, or the one that `tag` or `latest_universal` names;
    None if there is none."""
    if place.kind != "directory":
        return None
    names = place.names
    if is_universal(names):
        check_tag(place.path, tag)
        return place
    if LATEST in names and not tag:
        return None  # it holds an ordinary checkpoint, which is the one meant
    missing = Entry("missing", File("", 0))
    if not tag and LATEST_UNIVERSAL in names:
        where = place.join(LATEST_UNIVERSAL)
        tag = where.read_text(MAX_TAG).strip()
        check_inside(tag, where.path, place.path, nested=False)
        if names.get(tag, missing).kind != "directory":
            raise CorruptError(f"{where} contains {tag!r}, but no directory of this name is next to it.")
    if names.get(tag, missing).kind != "directory":
        return None
    inner = place.child(tag)
    return inner if is_universal(inner.names) else None


def is_universal(names: Mapping[str, Entry]) -> bool:
    """Return whether a directory with these names is a universal checkpoint."""
    kinds = [kind_of(name) for name in names]
    return ZERO in names and names[ZERO].kind == "directory" and "model" in kinds and "optim" not in kinds
