"""Pipelines of diffusers: directories of several models, each in a folder of its own, and what goes with them.

Source: diffusers' `pipelines/pipeline_utils.py`. model_index.json is an object of components by name, such as
{"unet": ["diffusers", "UNet2DConditionModel"]}: a folder of that name has what the class's `from_pretrained` reads.
Names that begin with _ describe the pipeline, [null, null] is a component that it lacks, and other values are settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.formats import companions, configs, model_files
from ckptconv.formats.source import Source
from ckptconv.storage.location import Location
from ckptconv.text import some

FAMILY = "diffusers"
_INDEX = "model_index.json"
# How the names of classes end that are no models: they have settings alone.
_OF_SETTINGS = ("Tokenizer", "Scheduler", "Processor", "FeatureExtractor")


class Pipeline(NamedTuple):
    """What a pipeline consists of: the files of its own, the folders of its models, and its folders of other files."""

    own: Source
    models: Sequence[str]
    others: Sequence[Source]


def is_one(place: Location, family: str = "") -> bool:
    """Whether `place` is the directory of a pipeline, and one may be meant where a `family` is expected."""
    return family in ("", FAMILY) and place.kind == "directory" and _INDEX in place.names


def read(place: Location) -> Pipeline:
    """Return what the pipeline at `place` consists of. Raise CorruptError if a component is not there."""
    classes = _classes(configs.read(place.join(_INDEX)))
    lacking = [name for name in classes if name not in place.names or place.names[name].kind != "directory"]
    if lacking:
        raise CorruptError(
            f"{place.join(_INDEX)} names {some(classes)}, and there are no folders of {some(lacking)}.",
            "Download or copy them again.",
        )
    models = [name for name in classes if model_files.holds_whole(place.join(name).names)]
    for name, of in classes.items():
        if name not in models and not of.removesuffix("Fast").endswith(_OF_SETTINGS):
            raise UnsupportedError(
                f"{place.join(name)} is a folder for a {of}, and holds no weights of a known name: it holds "
                f"{some(sorted(place.join(name).names), form=str)}.",
                "Copy the weights there: .bin files or safetensors.",
            )
    others = [_files(place.join(name), name) for name in classes if name not in models]
    known = {name for name in place.names if name in classes or companions.is_companion_name(name)}
    left = [name for name in sorted(place.names.keys() - known) if not name.startswith(".")]
    notes = [f"{place} holds more than the pipeline, which is left: {some(left, form=str)}."] if left else []
    return Pipeline(_files(place, "", notes), models, others)


def _classes(told: Mapping[str, Any]) -> dict[str, str]:
    """Return the class of each component."""
    return {
        name: str(value[1])
        for name, value in told.items()
        if not name.startswith("_") and isinstance(value, list) and len(value) == 2 and value[1] is not None
    }


def _files(place: Location, component: str, notes: Sequence[str] = ()) -> Source:
    """Return a source of no model, whose companions are copied."""
    return Source("a pipeline of diffusers", FAMILY, place.path, {}, structured=False, component=component, notes=notes)
