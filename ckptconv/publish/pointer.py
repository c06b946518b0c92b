"""Decide whether the file next to a directory of a form of `TREES`, which names it, may be written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.formats import model_files
from ckptconv.formats.run_names import LATEST, MAX_TAG, STATES
from ckptconv.formats.source import ADAPTER_CONFIG, CONFIG
from ckptconv.outputs.targets import pointer_of
from ckptconv.publish.earlier import Directory, file_made_as
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.text import some


def check_pointer(path: str, form: str, made_as: str, overwrite: bool, stores: Mapping[str, Any]) -> None:
    """Raise UsageError if the file next to the tree at `path` is another program's, or would hide a model of others: a
    program that reads a directory with it reads the tree."""
    pointer = Location(pointer_of(path, form), dict(stores))
    if pointer.kind == "missing" and (hidden := _hidden_models(pointer)):
        raise UsageError(
            f"{pointer} would make {pointer.parent} a {made_as} checkpoint, and hide {some(hidden, 3, str)} of other "
            "programs there.",
            f"Write the {made_as} checkpoint to a directory in another one.",
        )
    if pointer.kind == "missing" or overwrite:
        return
    named = pointer.read_text(MAX_TAG).strip() if pointer.kind == "file" else ""
    named = f"iter_{named:0>7}" if named.isdigit() else named  # as Megatron-LM names a step
    if named in ("", basename(path)) or file_made_as(pointer, made_as) == made_as:
        return
    earlier = Directory(pointer.parent.child(named)).manifest if named == basename(named) else None
    if earlier is None:
        raise UsageError(
            f"{pointer} names {named}, which ckptconv did not write, and would be replaced.",
            f"Write the {made_as} checkpoint to another directory, or give --overwrite.",
        )


def _hidden_models(pointer: Location) -> list[str]:
    """Return the names of others' weights in the directory of a model or of DeepSpeed's step, where a pointer is to be
    written. With DeepSpeed's own pointer a run is read already, and weights without a configuration or an index are
    read by their own names."""
    beside = Directory(pointer.parent)
    is_model = any(name in (CONFIG, ADAPTER_CONFIG) or name.endswith(model_files.INDEX) for name in beside.names)
    names = [] if LATEST in beside.names else [name for name in beside.names if not beside.made_as(name)]
    return [name for name in names if name.endswith(STATES) or (is_model and model_files.holds_whole([name]))]
