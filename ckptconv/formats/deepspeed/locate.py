"""Where a DeepSpeed checkpoint is, and which of its files belongs to which rank. Looks at names only.

Source: the file names that every release of DeepSpeed has written, see `_KINDS`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UsageError
from ckptconv.storage.files import Entry, listing, look, read_text
from ckptconv.storage.inside import check_inside, leads_out
from ckptconv.storage.paths import basename, dirname, join
from ckptconv.tensors.moves import File
from ckptconv.text import format_size

FAMILY = "deepspeed"
LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
MAX_TAG = 4096

# Beside a tag's files in most checkpoint directories; naming it means its directory.
RECOVERY_SCRIPT = "zero_to_fp32.py"

_KINDS = {
    "optim": re.compile(r"(?:bf16_)?(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_?optim_states\.pt"),
    "model": re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "expert": re.compile(r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "layer": re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<mp>\d+))?-model_states\.pt"),
    "expert_optim": re.compile(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
}
_FIELDS = {"optim": "optim", "model": "model", "expert": "experts", "layer": "layers", "expert_optim": "expert_optims"}
# What a file's numbers are called where two files have the same.
_RANKS = {
    "optim": "data-parallel rank {dp} of model-parallel rank {mp}",
    "model": "data-parallel rank {dp} of model-parallel rank {mp}",
    "expert": "expert {expert} of layer {layer} of model-parallel rank {mp}",
    "layer": "layer {layer} of tensor-parallel rank {mp}",
    "expert_optim": "expert-parallel rank {ep} of model-parallel rank {mp}",
}


@dataclass(frozen=True)
class Checkpoint:
    """The files of one tag, by what they are, and the names of all others.

    Ranks are (data-parallel, model-parallel), experts (layer, expert, model-parallel), layers (layer, tensor-parallel),
    the optimizers of experts, which are in use without ZeRO, (expert-parallel, model-parallel).
    """

    directory: str
    optim: Mapping[tuple[int, int], File] = field(default_factory=dict)
    model: Mapping[tuple[int, int], File] = field(default_factory=dict)
    experts: Mapping[tuple[int, int, int], File] = field(default_factory=dict)
    layers: Mapping[tuple[int, int], File] = field(default_factory=dict)
    expert_optims: Mapping[tuple[int, int], File] = field(default_factory=dict)
    others: tuple[str, ...] = ()


class Place(NamedTuple):
    """The directory of a tag, why it was taken where it is not the one given, and the file that named it, if any."""

    directory: str
    reason: str = ""
    pointer: str = ""


def is_tag_directory(names: Mapping[str, Entry]) -> bool:
    """Whether a directory holds the files of a tag itself."""
    return any(pattern.fullmatch(name) for name in names for pattern in (_KINDS["optim"], _KINDS["model"]))


def kind_of(name: str) -> str:
    """What a file of this name is: "optim", "model", "expert", "layer", "expert_optim", or "" for none of a tag's."""
    what = identity(name)
    return what[0] if what else ""


def is_rank_file(name: str) -> bool:
    """Whether a file of this name is one of a DeepSpeed checkpoint's."""
    return bool(kind_of(name)) or name in (LATEST, RECOVERY_SCRIPT)


def locate(path: str, tag: str, options: dict[str, Any] | None = None) -> Place:
    """The tag directory that `path` means: itself, the one `tag` or `latest` names, that of the file it is, or that of
    the only checkpoint in it.

    Raises UsageError where there is none or several, listing what there is; CorruptError where `latest` names none;
    UnsafeError where it points outside.
    """
    entry = look(path, options)
    if entry.kind == "missing":
        raise UsageError(f"{path} does not exist.")
    if entry.kind != "directory":
        if not is_rank_file(basename(path)):
            raise UsageError(
                f"{path} is a file, and not one that DeepSpeed writes.", "Give the directory that holds `latest`."
            )
        place = _locate_in(dirname(path), tag, options)
        return place._replace(reason=place.reason or f"the directory of {basename(path)}")
    return _locate_in(path, tag, options)


def check_tag(path: str, tag: str) -> None:
    """Raise UsageError where `tag` is not that whose directory `path` is."""
    if tag not in ("", basename(path)):
        raise UsageError(
            f"{path} is itself the directory of a tag, and --tag asks for {tag!r}.",
            "Give the directory that holds the tags, or leave --tag out.",
        )


def _locate_in(path: str, tag: str, options: dict[str, Any] | None) -> Place:
    names = listing(path, options)
    if is_tag_directory(names):
        check_tag(path, tag)
        return Place(path)
    if tag:
        _check_tag(tag)
    tags = tags_in(path, names, options)
    if tag in tags:
        return Place(join(path, tag), "the tag that was asked for")
    if not tags and LATEST not in names:
        return _locate_below(path, names, tag, options)
    if tag:
        raise UsageError(f"There is no tag {tag!r} with checkpoint files in {path}.", _offer(tag, tags))
    if LATEST not in names:
        raise UsageError(f"{path} has no file `latest` that says which tag to convert.", _offer("", tags))
    where = join(path, LATEST)
    named = read_text(where, MAX_TAG, options).strip()
    if not named:
        raise CorruptError(
            f"{where} is empty, where the name of a tag was expected: the save was interrupted.", _offer("", tags)
        )
    check_inside(named, where, path, nested=False)
    if named not in tags:
        raise CorruptError(
            f"{where} names the tag {named!r}, and there is no directory of that name with checkpoint files beside it.",
            _offer(named, tags),
        )
    return Place(join(path, named), "the tag that `latest` names", where)


def _locate_below(path: str, names: Mapping[str, Entry], tag: str, options: dict[str, Any] | None) -> Place:
    """A run's directory: the only checkpoint in it, or the only one that has the tag."""
    below = [
        name
        for name, entry in names.items()
        if entry.kind == "directory" and _holds_checkpoint(join(path, name), tag, options)
    ]
    if len(below) == 1:
        place = _locate_in(join(path, below[0]), tag, options)
        return place._replace(reason=f"{place.reason}, in the only checkpoint in {path}")
    with_tag = f" with the tag {tag!r}" if tag else ""
    if below:
        raise UsageError(
            f"{path} holds {len(below)} checkpoints{with_tag}, and is none itself.",
            f"Give one of them: {_shortened(below)}.",
        )
    raise UsageError(
        f"{path} is not a DeepSpeed checkpoint{with_tag}: it has neither `latest` nor files named *_optim_states.pt or "
        "*_model_states.pt, nor has a directory in it.",
        "Give the directory that was passed to save_checkpoint.",
    )


def _holds_checkpoint(path: str, tag: str, options: dict[str, Any] | None) -> bool:
    names = listing(path, options)
    return tag in tags_in(path, names, options) if tag else LATEST in names


def tags_in(path: str, names: Mapping[str, Entry], options: dict[str, Any] | None) -> list[str]:
    """The directories in `path`, which holds `names`, that hold the files of a tag."""
    return [
        name
        for name, entry in names.items()
        if entry.kind == "directory" and is_tag_directory(listing(join(path, name), options))
    ]


def _check_tag(tag: str) -> None:
    if leads_out(tag) or "/" in tag or tag == ".":
        raise UsageError(f"--tag names {tag!r}, which is not the name of a directory in the one that holds the tags.")


def _offer(wanted: str, tags: list[str]) -> str:
    if not tags:
        return "There are no tags there."
    close = difflib.get_close_matches(wanted, _numbered(tags), n=1)
    first = f"Did you mean {close[0]!r}? " if close else ""
    return f"{first}There are: {_shortened(tags)} (choose one with --tag)."


def _shortened(names: list[str]) -> str:
    """Names in the order of the numbers in them, the middle of a long list left out."""
    numbered = _numbered(names)
    return ", ".join(numbered if len(numbered) <= 10 else [*numbered[:4], "…", *numbered[-4:]])


def _numbered(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else 0 for part in re.split(r"(\d+)", name)])


def identity(name: str) -> tuple[str, tuple[int, ...]] | None:
    """What a file of this name is, and of which ranks; None where it is none of a tag's."""
    for kind, pattern in _KINDS.items():
        if match := pattern.fullmatch(name):
            numbers = {key: int(value or 0) for key, value in match.groupdict().items()}
            if kind == "expert" and match["layer"] is None:
                numbers["layer"] = -1  # before 0.6.0 one file held an expert of every layer
            return kind, tuple(numbers.values())
    return None


def described(kind: str, rank: tuple[int, ...]) -> str:
    """Whose a file is, for people."""
    return _RANKS[kind].format(**dict(zip(_KINDS[kind].groupindex, rank, strict=True)))


def files_of(directory: str, options: dict[str, Any] | None = None) -> Checkpoint:
    """Every file of a tag by what it is. Raises CorruptError where two files claim one rank."""
    found: dict[str, dict[tuple[int, ...], File]] = {kind: {} for kind in _KINDS}
    others = []
    for name, entry in listing(directory, options).items():
        what = identity(name)
        if what is None or entry.kind != "file":
            others.append(name)
            continue
        kind, rank = what
        if rank in found[kind]:
            other = found[kind][rank]
            raise CorruptError(
                f"{directory}: {basename(other.path)} ({format_size(other.size)}) and {name} "
                f"({format_size(entry.file.size)}) are both {described(kind, rank)}.",
                "Remove the one that belongs to another save.",
            )
        found[kind][rank] = entry.file
    kinds: dict[str, Any] = {_FIELDS[kind]: files for kind, files in found.items()}
    return Checkpoint(directory, **kinds, others=tuple(others))
