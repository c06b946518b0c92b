"""One module per input format, and the choice between them."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.formats import safetensors
from ckptconv.formats.dcp import locate as dcp_places
from ckptconv.formats.deepspeed import locate as zero_files
from ckptconv.formats.source import Source, Wanted
from ckptconv.formats.torch import file as torch_file
from ckptconv.formats.torch import sharded
from ckptconv.formats.torch.zip import what_it_is
from ckptconv.pickles import attacks
from ckptconv.storage.files import Entry, listing, look, open_reader
from ckptconv.storage.paths import basename, dirname, is_remote
from ckptconv.storage.spool import is_pipe, take_pipe, take_url

# For each family of formats what a path of it is, and the command that takes it.
FAMILIES = {
    zero_files.FAMILY: ("a DeepSpeed checkpoint", "zero-to-fp32 {} OUTPUT"),
    torch_file.FAMILY: ("a single file", "pt2safetensors {}"),
    dcp_places.FAMILY: ("a checkpoint of torch.distributed.checkpoint", "dcp2safetensors {} OUTPUT"),
    safetensors.FAMILY: ("in safetensors already", "safetensors2pt {} OUTPUT.pt"),
}


def open_source(
    path: str | os.PathLike[str],
    *,
    family: str = "",
    tag: str = "",
    exclude_frozen: bool = False,
    model_rank: int | None = None,
    key: str = "",
    optimizer: bool = False,
    inert: bool = False,
    spool_dir: str = "",
    storage_options: Mapping[str, Any] | None = None,
) -> Source:
    """Open the checkpoint under `path`, of whatever format it is. Reads descriptions only, no tensor data.

    `family` is the family the caller expects: a path of another is a UsageError that names the right command. `tag`,
    `exclude_frozen` and `model_rank`, one tensor-parallel rank, apply to DeepSpeed's checkpoints. With `key`, what is
    under that is read, and with `optimizer` its states, where neither is read with the weights. A file that is an
    attack is an UnsafeError, or with `inert` opened like any other: nothing in it runs either way. "-" is standard
    input; what comes through a pipe is kept in a temporary file in `spool_dir`.
    """
    path = os.fspath(path)
    if not path:
        raise UsageError("The input's name is empty.", "Is it a variable of the shell that was not set?")
    if is_pipe(path):
        path = take_pipe(path, spool_dir)
    elif path.startswith(("http://", "https://")):
        take_url(path, dict(storage_options or {}), spool_dir)
    wanted = Wanted(key, optimizer, tag, exclude_frozen, model_rank)
    with attacks.refused(not inert):
        source = _open(path, family, wanted, storage_options)
    if source.family == zero_files.FAMILY:
        return source
    kind, _ = FAMILIES[source.family]
    idle = [
        f"{option} is of no use: {path} is {kind}, and it is for DeepSpeed's checkpoints."
        for option, given in (("--tag", tag), ("--exclude-frozen-parameters", exclude_frozen))
        if given
    ]
    return replace(source, warnings=[*source.warnings, *idle])


def complete(source: Source, *, key: str = "", optimizer: bool = False, inert: bool = False) -> Source:
    """`source` with what is under `key`, and with `optimizer` its states: opened again where it lacks them."""
    wanted = replace(source.wanted, key=key or source.wanted.key, optimizer=optimizer or source.wanted.optimizer)
    if source.reread is None or wanted == source.wanted:
        return source
    with attacks.refused(not inert):
        return source.reread(wanted)


def _open(path: str, family: str, wanted: Wanted, storage_options: Mapping[str, Any] | None) -> Source:
    options = dict(storage_options or {})
    entry = look(path, options)
    if entry.kind == "missing":
        raise UsageError(f"{path} does not exist.", _nearby(path, options))
    if entry.kind == "file" and dcp_places.is_part(path):
        path = dcp_places.directory_of(path)
        entry = look(path, options)
    names = listing(path, options) if entry.kind == "directory" else {}
    found = _family(path, entry.kind, names, options, family)
    if sharded.holds_set(names) and (family or found or torch_file.FAMILY) == torch_file.FAMILY:
        return sharded.read(path, names, options)
    if family == dcp_places.FAMILY and found == safetensors.FAMILY:
        # What its HuggingFaceStorageWriter makes of a model in one process is an ordinary set.
        return safetensors.read(path, options)
    if family and found and family != found:
        if found == torch_file.FAMILY:
            _check_beginning(path, options)
        kind, command = FAMILIES[found]
        raise UsageError(f"{path} is {kind}.", f"Use: ckptconv {command.format(shlex.quote(path))}")
    # What only one family needs is imported when one of it is there: half of the time to start is imports.
    if (found or family) == dcp_places.FAMILY:
        from ckptconv.formats.dcp import read as dcp

        return dcp.read(path, options, wanted)
    if found == safetensors.FAMILY:
        return safetensors.read(path, options)
    if (found or family) == zero_files.FAMILY:
        from ckptconv.formats.deepspeed import read as deepspeed
        from ckptconv.formats.deepspeed import universal

        return universal.read(path, wanted, options) or deepspeed.read(path, wanted, options)
    if entry.kind != "file":
        raise UsageError(
            f"{path} is {entry.described}, where a checkpoint was expected, and holds none that is known.",
            _within(names) if entry.kind == "directory" else "",
        )
    if sharded.is_index(path):
        return sharded.read(path, options=options)
    source = torch_file.read(path, options)
    if sharded.is_shard(path):
        part = f"{path} is one file of a sharded set: name the directory or the index to convert all."
        return replace(source, warnings=[*source.warnings, part])
    return source


def ranks_to_convert(path: str, tag: str, options: dict[str, Any], *, inert: bool = False) -> list[int]:
    """The tensor-parallel ranks of a DeepSpeed checkpoint; `inert` as in `open_source`."""
    from ckptconv.formats.deepspeed import read as deepspeed

    with attacks.refused(not inert):
        return deepspeed.ranks_to_convert(path, tag, options)


def _family(path: str, kind: str, names: Mapping[str, Entry], options: dict[str, Any], expected: str) -> str:
    """The family that a path belongs to by its name, its neighbours, the names in it, or how it begins; "" where that
    does not tell.

    A directory may hold checkpoints of several: the `expected` one, or else DeepSpeed's, is meant.
    """
    if kind == "file":
        if _is_safetensors(path, options):
            return safetensors.FAMILY
        # A rank's file is a .pt like any other: it is converted as one unless the checkpoint around it is asked for.
        return "" if zero_files.is_rank_file(basename(path)) else torch_file.FAMILY
    written = any(name.endswith((safetensors.SUFFIX, safetensors.INDEX_SUFFIX)) for name in names)
    if written and expected == safetensors.FAMILY:
        return expected
    is_dcp = dcp_places.is_directory(names)
    if expected in ("", dcp_places.FAMILY) and is_dcp:
        return dcp_places.FAMILY
    if expected == dcp_places.FAMILY and dcp_places.locate(path, names, options):
        return dcp_places.FAMILY
    if kind == "directory" and (
        {zero_files.LATEST, zero_files.LATEST_UNIVERSAL} & set(names)
        or zero_files.is_tag_directory(names)
        or zero_files.tags_in(path, names, options)
    ):
        return zero_files.FAMILY
    # What lies below is meant where nothing else is there; shards of safetensors also beside what was made of them.
    alone = not (written or sharded.holds_set(names)) or dcp_places.SHARDED in names
    if is_dcp or (not expected and alone and dcp_places.locate(path, names, options)):
        return dcp_places.FAMILY
    return safetensors.FAMILY if written and expected != zero_files.FAMILY else ""


def _is_safetensors(path: str, options: dict[str, Any]) -> bool:
    """By what it begins with; or by its name, unless it begins as a zip archive does.

    Raises UsageError for what stands for no checkpoint under the name that it has.
    """
    if path.endswith(safetensors.INDEX_SUFFIX):
        return True
    head, size = _beginning(path, dcp_places.BEGINNING, options)
    if dcp_places.is_metadata(head):
        raise UsageError(
            f"{path} is the {dcp_places.METADATA} of a checkpoint of torch.distributed.checkpoint, under another name.",
            f"Rename it to {dcp_places.METADATA}, beside the {dcp_places.SUFFIX} files, and name the directory.",
        )
    named = path.endswith(safetensors.SUFFIX) and not head.startswith(b"PK\x03\x04")
    return named or safetensors.looks_like(head, size)


def _check_beginning(path: str, options: dict[str, Any]) -> None:
    """Raise the error for a file that no command takes, such as a web page: another command is no help with it."""
    what = what_it_is(*_beginning(path, 512, options))
    if what:
        raise type(what)(f"{path} {what.message}", what.hint)


def _beginning(path: str, count: int, options: dict[str, Any]) -> tuple[bytes, int]:
    """The first bytes of a file, `count` of them if it has as many, and its size."""
    reader = open_reader(path, options)
    try:
        return reader.read_at(0, min(reader.file.size, count)), reader.file.size
    finally:
        reader.close()


def _within(names: Mapping[str, Entry], most: int = 5) -> str:
    """What a directory holds that is no checkpoint, and what to do."""
    if not names:
        return "It is empty."
    shown = sorted(names)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return f"Name a file, or the checkpoint's own directory. It holds {', '.join(shown[:most])}{more}."


def _nearby(path: str, options: dict[str, Any]) -> str:
    """What may have been meant by a path that does not exist: where it leads, or names beside it."""
    if os.path.islink(path):
        return f"It is a symbolic link to {os.readlink(path)}, which is not there."
    if path.startswith("~"):
        return f"The shell did not expand the ~. Did you mean {os.path.expanduser(path)}?"
    scheme, colon, rest = path.partition(":/")
    if colon and scheme.isalnum() and not rest.startswith("/"):
        return f"Did you mean {scheme}://{rest}?"
    parent = dirname(path)
    if is_remote(path) or look(parent, options).kind != "directory":
        return ""
    close = difflib.get_close_matches(basename(path), list(listing(parent, options)), n=1, cutoff=0.8)
    return f"Did you mean {os.path.join(os.path.dirname(path), close[0])}?" if close else ""
