"""Pipelines: directories of several models, each in a folder of its own, and files that belong to them.

`registered.PIPELINES` has the names that mark a pipeline, with the module that reads it. The module has

- `is_one(place, family, copies)`: whether a directory is a pipeline where a `family` is expected. A directory with a
single model counts only if its other files are copied too (`copies`). - `read(place)`: the `Pipeline` there.
`together(place, sources)`: all of its sources as one, to be inspected. - `hint(place)`: what to do if one model is
needed. - `check_copied(source, files, options)`: raises UsageError if a name that marks a pipeline is copied without
it. - `cast_warnings(source, dtype, options)`: warnings about a part that is cast to a dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ckptconv.formats.model_files import SAFETENSORS, TORCH
from ckptconv.formats.registered import PIPELINES
from ckptconv.formats.source import PIPELINE, Source
from ckptconv.storage.location import Location

# If one of these families, or any, is expected, a pipeline may be meant. Otherwise its directory is not searched.
_FAMILIES = ("", PIPELINE, SAFETENSORS, TORCH)


class Pipeline(NamedTuple):
    """The parts of a pipeline: the folders of its models, "" for the pipeline's own, and the sources of other files, in
    folders or of the pipeline's own."""

    models: Sequence[str]
    others: Sequence[Source]


def told_by(names: Iterable[str]) -> Iterator[Any]:
    """Yield the modules of the pipelines that one of `names` marks."""
    every = set(names)
    yield from map(import_module, dict.fromkeys(module for name, module in PIPELINES.items() if name in every))


def reader_of(place: Location, family: str = "", *, copies: bool = True) -> Any:
    """Return the module that reads `place` as a pipeline; None if it is none, or not meant."""
    names = place.names if family in _FAMILIES and place.kind == "directory" else ()
    return next((module for module in told_by(names) if module.is_one(place, family, copies=copies)), None)


def cast_warnings(source: Source, dtype: str, options: Any) -> list[str]:
    """Return warnings about a part of a pipeline that is cast to `dtype`."""
    marks = PIPELINES if source.component is not None else ()
    return [text for module in told_by(marks) for text in module.cast_warnings(source, dtype, options)]
