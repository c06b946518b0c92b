"""Say which model of a pipeline is to be converted alone, if options name a part of the whole."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import CkptconvError
from ckptconv.features.diffusers import pipelines
from ckptconv.storage.location import Location
from ckptconv.storage.paths import join, normalize


def advise(error: CkptconvError, path: str, options: Mapping[str, Any]) -> None:
    """Add to the error of converting a part of the pipeline at `path` that is named by --key or --include how the
    model in its folder is converted."""
    place = Location(normalize(path), dict(options.get("storage_options") or {}))
    asked = [options.get("key") or "", *(options.get("include") or ())]
    if not any(asked) or not pipelines.is_one(place):
        return
    models = [name for name in pipelines.read(place).models if name]
    folder = next(
        (name for name in models for word in asked if word == name or word.startswith((f"{name}.", f"{name}/"))), ""
    )
    if folder:
        command = f"ckptconv convert {shlex.quote(join(path, folder))} OUTPUT"
        error.hint = f"{path} is a pipeline of several models. Convert one model by specifying its folder: {command}"
