"""Decides whether a tree may replace what lies at its place, and the file next to it what is there."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.formats import model_files
from ckptconv.formats.run_names import LATEST, MAX_TAG, STATES, TRACKERS, TREES
from ckptconv.formats.source import ADAPTER_CONFIG, CONFIG
from ckptconv.options.kinds import OptionWarning
from ckptconv.options.table import Options
from ckptconv.outputs.targets import pointer_of
from ckptconv.publish.claims import Claim
from ckptconv.publish.earlier import UNFINISHED, Directory, file_made_as
from ckptconv.publish.present import NEW_DIRECTORY, check_clobber, files_below
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.text import some


def check(claim: Claim, place: Location, options: Options) -> None:
    """Raise UsageError if what lies at the `place` of a claim, or next to it, may not be replaced."""
    if place.kind not in ("directory", "missing"):
        raise UsageError(f"{claim.path} is a file, but the output must be a directory.")
    directory = Directory(place)
    if directory.names:
        check_clobber(options, claim.path)
    for name in files_below(place) if directory.names else ():
        # The file that names the tree lies next to it.
        is_written = name in claim.names and name != TREES[claim.form]
        is_ours = directory.made_as(name) in (claim.made_as, UNFINISHED) or (directory.is_being_made and is_written)
        if not is_ours and not (claim.overwrite and is_written):
            raise UsageError(
                f"{claim.path} would be replaced as a whole, but contains files of another kind, such as {name}.",
                NEW_DIRECTORY,
            )
    _check_pointer(claim.path, claim.form, claim.made_as, claim.overwrite, options.storage_options)


def _check_pointer(path: str, form: str, made_as: str, overwrite: bool, stores: Mapping[str, Any]) -> None:
    """Raise UsageError if the file next to the tree at `path` is another program's, or would hide a model of others: a
    program that reads a directory with it reads the tree."""
    pointer = Location(pointer_of(path, form), dict(stores))
    if pointer.kind == "missing" and (hidden := _hidden_models(pointer)):
        raise UsageError(
            f"{pointer} would turn {pointer.parent} into a {made_as} checkpoint, and hide {some(hidden, 3, str)} of "
            "other programs there.",
            f"Write the {made_as} checkpoint to a subdirectory of another directory.",
        )
    if pointer.kind == "missing" or overwrite:
        return
    named = pointer.read_text(MAX_TAG).strip() if pointer.kind == "file" else ""
    # As Megatron-LM names a step, where its file has the number alone.
    named = f"iter_{named:0>7}" if named.isdigit() and basename(pointer.path) in TRACKERS else named
    is_ours = named in ("", basename(path)) or file_made_as(pointer, made_as) == made_as
    if not is_ours and not (named == basename(named) and Directory(pointer.parent.child(named)).manifest):
        raise UsageError(
            f"{pointer} would be replaced, but it refers to {named}, which ckptconv did not write.",
            f"Write the {made_as} checkpoint to another directory, or use --overwrite.",
        )
    _warn_of_other(pointer, named, basename(path))


def _warn_of_other(pointer: Location, named: str, step: str) -> None:
    """Warn if the file next to a tree names another step than `step`, which is not the next one by their numbers."""
    is_alike = re.sub(r"\d+", "#", named) == re.sub(r"\d+", "#", step)
    numbers = [[int(number) for number in re.findall(r"\d{1,18}", name)] for name in (step, named)]
    if named not in ("", step) and not (is_alike and numbers[0] > numbers[1]):
        older = f"{step}, an older step" if is_alike else step
        text = f"{pointer} referred to {named}, and now refers to {older}: programs that follow it load that step."
        warnings.warn(text, OptionWarning, stacklevel=2)


def _hidden_models(pointer: Location) -> list[str]:
    """Return the names of others' weights in the directory of a model or of DeepSpeed's step, where a pointer is to be
    written. With DeepSpeed's own pointer a run is read already, and weights without a configuration or an index are
    read by their own names."""
    beside = Directory(pointer.parent)
    is_model = any(name in (CONFIG, ADAPTER_CONFIG) or name.endswith(model_files.INDEX) for name in beside.names)
    names = [] if LATEST in beside.names else [name for name in beside.names if not beside.made_as(name)]
    return [name for name in names if name.endswith(STATES) or (is_model and model_files.holds_whole([name]))]
