"""Where a DeepSpeed checkpoint is, and which of its files belongs to which rank. Looks at names only.

Source: the file names that every release of DeepSpeed has written, see `_KINDS`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CorruptError, UnsafeError, UsageError
from ckptconv.storage import Entry, basename, dirname, join, listing, look, read_text
from ckptconv.tensors import File

LATEST = "latest"
MAX_TAG = 4096

_KINDS = {
    "optim": re.compile(r"(?:bf16_)?(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_?optim_states\.pt"),
    "model": re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "expert": re.compile(r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "layer": re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<mp>\d+))?-model_states\.pt"),
}


@dataclass(frozen=True)
class Checkpoint:
    """The files of one tag, by what they are.

    Ranks are (data-parallel, model-parallel), experts (layer, expert), layers (layer, model-parallel).
    """

    directory: str
    optim: Mapping[tuple[int, int], File] = field(default_factory=dict)
    model: Mapping[tuple[int, int], File] = field(default_factory=dict)
    experts: Mapping[tuple[int, int], File] = field(default_factory=dict)
    layers: Mapping[tuple[int, int], File] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    def files(self) -> list[File]:
        return [file for group in (self.optim, self.model, self.experts, self.layers) for file in group.values()]


def is_tag_directory(names: Mapping[str, Entry]) -> bool:
    """Whether a directory holds the files of a tag itself."""
    return any(pattern.fullmatch(name) for name in names for pattern in (_KINDS["optim"], _KINDS["model"]))


def kind_of(name: str) -> str:
    """What a file of this name is: "optim", "model", "expert", "layer", or "" for none of a tag's."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name)), "")


def is_rank_file(name: str) -> bool:
    """Whether a file of this name is one of a tag's."""
    return any(pattern.fullmatch(name) for pattern in _KINDS.values())


def locate(path: str, tag: str, options: dict[str, Any] | None = None) -> str:
    """The tag directory that `path` means: itself, the one `tag` or `latest` names, or that of the file it is.

    Raises UsageError where there is none, listing what there is; CorruptError where `latest` names none; UnsafeError
    where it points outside.
    """
    entry = look(path, options)
    if entry.kind == "missing":
        raise UsageError(f"{path} does not exist.")
    if entry.kind != "directory":
        if is_rank_file(basename(path)) or basename(path) == LATEST:
            path = dirname(path)
        else:
            raise UsageError(
                f"{path} is a file, and not one that DeepSpeed writes.", "Give the directory that holds `latest`."
            )
    names = listing(path, options)
    if is_tag_directory(names) and (not tag or tag == basename(path)):
        return path
    tags = tags_in(path, names, options)
    if tag:
        _check_tag(tag, "--tag", UsageError)
        if tag not in tags:
            raise UsageError(f"There is no tag {tag!r} with checkpoint files in {path}.", _offer(tag, tags))
        return join(path, tag)
    if LATEST in names:
        where = join(path, LATEST)
        named = read_text(where, MAX_TAG, options).strip()
        _check_tag(named, where, UnsafeError)
        if named not in tags:
            raise CorruptError(
                f"{where} names the tag {named!r}, and there is no directory of that name with checkpoint files "
                "beside it.",
                _offer(named, tags),
            )
        return join(path, named)
    if tags:
        raise UsageError(f"{path} has no file `latest` that says which tag to convert.", _offer("", tags))
    raise UsageError(
        f"{path} is not a DeepSpeed checkpoint: it has neither `latest` nor files named *_optim_states.pt or "
        "*_model_states.pt, nor has a directory in it.",
        "Give the directory that was passed to save_checkpoint.",
    )


def tags_in(path: str, names: Mapping[str, Entry], options: dict[str, Any] | None) -> list[str]:
    """The directories in `path`, which holds `names`, that hold the files of a tag."""
    return [
        name
        for name, entry in names.items()
        if entry.kind == "directory" and is_tag_directory(listing(join(path, name), options))
    ]


def _check_tag(tag: str, where: str, kind: type[UsageError] | type[UnsafeError]) -> None:
    if not tag or tag in (".", "..") or "/" in tag or "\\" in tag or "\0" in tag:
        raise kind(
            f"{where} names {tag!r}, which is not the name of a directory beside it. Nothing was read from there."
        )


def _offer(wanted: str, tags: list[str]) -> str:
    if not tags:
        return "There are no tags there."
    numbered = sorted(tags, key=lambda tag: [int(part) if part.isdigit() else 0 for part in re.split(r"(\d+)", tag)])
    close = difflib.get_close_matches(wanted, numbered, n=1)
    first = f"Did you mean {close[0]!r}? " if close else ""
    shown = numbered if len(numbered) <= 10 else [*numbered[:4], "…", *numbered[-4:]]
    return f"{first}There are: {', '.join(shown)} (choose one with --tag)."


def files_of(directory: str, options: dict[str, Any] | None = None) -> Checkpoint:
    """Every file of a tag by what it is. Raises CorruptError where two files claim one rank."""
    found: dict[str, dict[tuple[int, int], File]] = {kind: {} for kind in _KINDS}
    others = []
    for name, entry in listing(directory, options).items():
        kind, match = next(
            ((kind, match) for kind, pattern in _KINDS.items() if (match := pattern.fullmatch(name))), ("", None)
        )
        if match is None or entry.kind != "file":
            others.append(name)
            continue
        numbers = {key: int(value or 0) for key, value in match.groupdict().items()}
        if kind in ("optim", "model"):
            rank = numbers["dp"], numbers["mp"]
        else:
            rank = numbers["layer"], numbers["expert" if kind == "expert" else "mp"]
        if rank in found[kind]:
            raise CorruptError(
                f"{directory}: {basename(found[kind][rank].path)} and {name} are both rank {rank[0]} of model-parallel "
                f"rank {rank[1]}.",
                "Remove the one that belongs to another save.",
            )
        found[kind][rank] = entry.file
    return Checkpoint(directory, found["optim"], found["model"], found["expert"], found["layer"], tuple(others))
