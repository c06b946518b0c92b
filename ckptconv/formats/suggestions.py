"""Suggestions for a path that is no checkpoint."""

from __future__ import annotations

import difflib
import glob
import os
import re
import shlex

from ckptconv.errors import CkptconvError
from ckptconv.formats.format import LIKELY, Probe, surest
from ckptconv.formats.model_files import SUFFIX, TORCH_MODELS
from ckptconv.formats.registered import FORMATS, reader_of
from ckptconv.formats.source import STEMS
from ckptconv.options.registered import several
from ckptconv.storage import stores
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_quoted, is_remote
from ckptconv.text import some

# The most entries of a directory that are searched for checkpoints to suggest, and the most that are suggested.
_LOOKED_AT, _FEW = 50, 5


def within(place: Location) -> str:
    """Return a sentence on the content of a directory without a checkpoint, and on what to do."""
    names = sorted(name for name in place.names if not name.startswith("."))
    if not place.names:
        return "The server does not list its files." if is_quoted(place.path) else "It is empty."
    if pipeline := reader_of(place):
        return str(pipeline.hint(place))
    checkpoints = [str(place.join(name)) for name in names[:_LOOKED_AT] if is_checkpoint(place.join(name))]
    if len(checkpoints) > 1:
        words = " ".join(map(shlex.quote, checkpoints)) if len(checkpoints) <= _FEW else "INPUT..."
        return (
            f"It contains several checkpoints: {some(checkpoints, _FEW, str)}. Give one of them"
            f"{several('. To convert several: {}', words) or '.'}"
        )
    if checkpoints:
        return f"Give the checkpoint in this directory: {checkpoints[0]}"
    if all(name.startswith(HIDDEN) for name in place.names):
        return "It contains an unfinished conversion. Repeat its command to continue, or delete the directory."
    return f"Give a file, or the directory of the checkpoint. It contains {some(sorted(place.names), form=str)}."


def is_checkpoint(place: Location) -> bool:
    """Return whether a supported format is fairly sure to read `place`. A file in a store is not opened for this."""
    if is_remote(place.path) or place.name.endswith(".json"):  # a set with an index was recognized before
        return False
    try:
        best = surest(FORMATS, Probe(place))
    except (CkptconvError, OSError):
        return False
    return best is not None and best[1].sure >= LIKELY


def nearby(place: Location) -> str:
    """Suggest the meaning of a path that does not exist: its link's target, or a similar name next to it."""
    path = place.path
    if os.path.islink(path):
        return f"It is a symbolic link to {os.readlink(path)}, which does not exist."
    if path.startswith("~"):
        return f"The shell did not expand the ~. Did you mean {os.path.expanduser(path)}?"
    if glob.has_magic(path) and not is_remote(path):
        if not (matches := sorted(glob.glob(path))):
            return "The shell found no match for the pattern, and passed the pattern unchanged."
        return f"The shell did not expand the pattern; without quotes, it would match {some(matches, form=str)}."
    scheme, colon, path_in_store = path.partition(":")
    if colon and (scheme in stores.STORES or path_in_store[:1] == "/") and scheme.isalnum() and "://" not in path:
        return f"Did you mean {scheme}://{path_in_store.lstrip('/')}?"
    if not is_remote(path) and place.parent.kind == "missing":
        meant = re.fullmatch(r"Did you mean (.+)\?", nearby(place.parent))
        if meant and (right := Location(os.path.join(meant[1], place.name))).kind != "missing":
            return f"Did you mean {right}?"
    if is_remote(path) or place.parent.kind != "directory":
        return stores.hint(path, place.options)
    stem, suffix = os.path.splitext(place.name)
    if place.name in (*TORCH_MODELS, *(f"{stem}{SUFFIX}" for stem in STEMS)) and is_checkpoint(place.parent):
        return f"The weights in {place.parent} have other names. Give this directory."
    if suffix and place.parent.join(stem).kind == "directory" and is_checkpoint(place.parent.join(stem)):
        return f"Did you mean {os.path.splitext(path)[0]}?"
    begun = re.compile(rf"{re.escape(stem)}(\D.*{re.escape(suffix)}|\.(bin|ckpt|pth?|safetensors))", re.DOTALL)
    if stem and len(near := [name for name in place.parent.names if begun.fullmatch(name)]) == 1:
        return f"Did you mean {os.path.join(os.path.dirname(path), near[0])}?"
    form = re.sub(r"\d+", "#", place.name)
    if series := [name for name in place.parent.names if re.sub(r"\d+", "#", name) == form != place.name]:
        series.sort(key=lambda name: [*map(int, re.findall(r"\d+", name))])
        return f"Its directory contains {some(series, form=str)}."
    names = {name.lower(): name for name in place.parent.names}
    if close := difflib.get_close_matches(place.name.lower(), list(names), n=1, cutoff=0.8):
        return f"Did you mean {os.path.join(os.path.dirname(path), names[close[0]])}?"
    if not suffix and is_checkpoint(place.parent):
        return f"If {place.name} is a part of the checkpoint {place.parent}, give that with --key {place.name}."
    return "" if "/" in path else stores.hint(path, place.options)
