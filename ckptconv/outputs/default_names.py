"""Names of outputs that the user does not name."""

from __future__ import annotations

import os
import re

from ckptconv.errors import UsageError
from ckptconv.formats import model_files
from ckptconv.formats.source import CONFIG, MODEL, Source
from ckptconv.outputs.kinds import KINDS, NAMED
from ckptconv.outputs.targets import ENDING
from ckptconv.pickles.children import is_tensor, walk
from ckptconv.pickles.nodes import Opaque
from ckptconv.plan import NUMBERED
from ckptconv.storage import stores
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, dirname, is_remote

# A single file of a sharded set gets the name that it would have among the others.
_TORCH_STEM = "pytorch_model"
_SHARD_STEM = rf"^{_TORCH_STEM}(?={NUMBERED}$)"


def suffix_of(to: str) -> str:
    """Return the suffix of the files that a value of `to` asks for; "" if it asks for a directory."""
    return next((ending for kind in NAMED[to] for ending in KINDS[kind].suffixes), "") if to else model_files.SUFFIX


def check_tensors(source: Source, is_named: bool) -> None:
    """Raise UsageError for a file for torch.load without a tensor if it is one object, or if OUTPUT is not named."""
    state, hint = source.weights, "with OUTPUT, a structure record keeps them."
    if isinstance(state, Opaque):
        is_named, hint = False, "for a model in the same directory, give the directory as INPUT."
    if source.family == model_files.TORCH and not is_named and not any(map(is_tensor, walk(state))):
        problem = f": it is an object of {state.name}" if isinstance(state, Opaque) else " to write next to it"
        raise UsageError(f"{source.path} contains no tensor{problem}.", f"ckptconv inspect shows its values; {hint}")


def default_output(source: Source, typed: Location, suffix: str = model_files.SUFFIX) -> str:
    """Return the path of an output without a name: next to the input, which the user gave as `typed`. It is one file if
    `suffix` is another one than that of safetensors.

    The output of an input from the hub is written to the current directory. Raise UsageError for an input in
    safetensors, whose output would have the same name.
    """
    if suffix != model_files.SUFFIX:
        return _one_file(typed, suffix)
    is_directory = typed.at(source.path).kind == "directory"
    if stores.is_repository(typed.path):
        return _here(typed.path, is_directory)
    if source.family == model_files.SAFETENSORS:
        raise UsageError(
            f"{source.path} is already in safetensors, so OUTPUT is required.",
            "Give a name that ends in .safetensors, a directory, or, for torch.load, a name that ends in .pt.",
        )
    if source.shards:
        return source.path if is_directory else dirname(source.path)
    if is_directory:
        # A run's directory may stand for the checkpoint of a step in it.
        path = typed.path if typed.kind == "directory" else source.path
        path = path.rstrip("/") or path
        named = path if is_remote(path) or basename(path) not in ("", ".", "..") else os.path.abspath(path)
        return f"{named}-{model_files.SUFFIX[1:]}"
    stem, _ = os.path.splitext(source.path)
    directory, slash, name = stem.rpartition("/")
    beside = typed.at(dirname(source.path))
    whole = f"{MODEL}{model_files.SUFFIX}"
    if name == _TORCH_STEM and CONFIG in beside.names and whole not in beside.names:
        name = MODEL  # which from_pretrained looks for
    return directory + slash + file_name(name)


def _one_file(typed: Location, suffix: str) -> str:
    """Return the path of the output of `typed`, one file, which ends in `suffix`."""
    path = typed.path.rstrip("/")
    if stores.is_repository(path):
        path = basename(stores.plain(path))
    elif basename(path) in ("", ".", ".."):
        path = os.path.abspath(path)
    is_directory = typed.kind == "directory"
    return file_name(path if is_directory else os.path.splitext(path.removesuffix(".index.json"))[0], suffix)


def _here(typed: str, is_directory: bool) -> str:
    """Return the name, in the current directory, of the output of `typed`, which is on the hub."""
    name = basename(stores.plain(typed.rstrip("/")))
    if is_directory:
        return f"{name}/" if ENDING.search(name) else name
    return file_name(os.path.splitext(name)[0])


def file_name(stem: str, suffix: str = model_files.SUFFIX) -> str:
    """Return the name of the output of one file; `stem` is its name without the suffix."""
    return (re.sub(_SHARD_STEM, "model", stem) if suffix == model_files.SUFFIX else stem) + suffix
