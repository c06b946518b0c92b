"""Pipelines: directories of several models, each in a folder of its own, and what goes with them.

Which names tell one is in `registered.PIPELINES`, with the module that reads it. That has

- `is_one(place, family, copies)`: whether a directory is one that may be meant where a `family` is expected. If it has
  a single model, it may be one only if what is beside that is copied too (`copies`).
- `read(place)`: the `Pipeline` there. `together(place, sources)`: all of its sources as one, to be looked at.
- `hint(place)`: what to do where one model is needed.
- `check_copied(source, files, options)`: raises UsageError if a name that tells a pipeline is copied without it.
- `cast_warnings(source, dtype, options)`: what a user should know of a part that is cast to a dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ckptconv.formats.model_files import SAFETENSORS, TORCH
from ckptconv.formats.registered import PIPELINES
from ckptconv.formats.source import PIPELINE, Source
from ckptconv.storage.location import Location

# Where one of these is expected, or any, a pipeline may be meant. Else its directory is not looked at.
_FAMILIES = ("", PIPELINE, SAFETENSORS, TORCH)


class Pipeline(NamedTuple):
    """What a pipeline consists of: the folders of its models, "" for the pipeline's own, and sources of other files, in
    folders or of the pipeline's own."""

    models: Sequence[str]
    others: Sequence[Source]


def told_by(names: Iterable[str]) -> Iterator[Any]:
    """Yield the modules of pipelines that one of `names` tells."""
    every = set(names)
    yield from map(import_module, dict.fromkeys(module for name, module in PIPELINES.items() if name in every))


def reader_of(place: Location, family: str = "", *, copies: bool = True) -> Any:
    """Return the module that reads `place` as a pipeline; None if it is none, or not meant."""
    names = place.names if family in _FAMILIES and place.kind == "directory" else ()
    return next((module for module in told_by(names) if module.is_one(place, family, copies=copies)), None)


def cast_warnings(source: Source, dtype: str, options: Any) -> list[str]:
    """Return what a user should know of a part of a pipeline that is cast to `dtype`."""
    asked = PIPELINES if source.component is not None else ()
    return [text for module in told_by(asked) for text in module.cast_warnings(source, dtype, options)]
