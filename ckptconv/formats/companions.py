"""Companions: the small files beside a checkpoint that `from_pretrained` needs as well, such as config.json.

Source: transformers' and diffusers' names for what `save_pretrained` writes. Only files of data are companions: no code
and no pickles.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CkptconvError, CorruptError
from ckptconv.formats.source import ADAPTER, Source
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.tensors.moves import File
from ckptconv.text import some

CONFIG = "config.json"
# PEFT's, beside the weights of an adapter.
ADAPTER_CONFIG = "adapter_config.json"
# Meta's configuration beside Llama's files, and Model Optimizer's: read when they are asked for, and not copied.
PARAMS, QUANTIZED = "params.json", "hf_quant_config.json"
_ASKED_FOR = (PARAMS, QUANTIZED)
# Configurations of models, pipelines and schedulers, the files of tokenizers, those of processors of images and sound,
# and what says whose it is.
_JSON = (
    "config model_index scheduler_config generation_config "
    "tokenizer tokenizer_config special_tokens_map added_tokens vocab chat_template "
    "preprocessor_config processor_config image_processor_config video_preprocessor_config"
)
_OTHERS = (
    "vocab.txt vocab.bpe merges.txt chat_template.jinja tokenizer.model spiece.model sentencepiece.model "
    "sentencepiece.bpe.model spm.model source.spm target.spm README.md "
    "LICENSE LICENSE.md LICENSE.txt NOTICE NOTICE.md NOTICE.txt"
)
_NAMES = frozenset([*(f"{stem}.json" for stem in _JSON.split()), *_OTHERS.split(), ADAPTER_CONFIG])
# The largest file that is copied, and the largest configuration that is read, in bytes. The largest tokenizers have
# some 35 MB.
LARGEST, _LARGEST_CONFIG = 64 << 20, 1 << 20
# Directories of huggingface_hub's cache, beside each other: the links in the first lead to files in the second.
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


class Companions(NamedTuple):
    """The companions of a checkpoint by name, what a user should know of files that are none, and their directory."""

    files: Mapping[str, File]
    warnings: tuple[str, ...] = ()
    directory: str = ""


def is_companion_name(name: str) -> bool:
    """Whether a file of that name may be a companion."""
    return name in _NAMES


def together(source: Source, options: Mapping[str, object], names: Collection[str] | None = None) -> dict[str, File]:
    """Return the companions of `source` and of its reference, of these `names` if they are given; of those that both
    have, the reference's."""
    both = [source, source.reference] if source.reference else [source]
    return {name: file for one in both for name, file in beside(one, options, names).files.items()}


def beside(source: Source, options: Mapping[str, object], names: Collection[str] | None = None) -> Companions:
    """Return the companions of `source`, of these `names` if they are given: in its directory, or if none are there, in
    the one with the file that points to it.

    A file that is too large, or a link that leads out of the directory, is none. But the links of huggingface_hub's
    cache lead to files of the same repository.
    """
    found = Companions({})
    if names is None and source.stem != ADAPTER:
        # Beside a model, loaders would take it for a request for the adapter.
        names = _NAMES - {ADAPTER_CONFIG}
    for place in _directories(source, options):
        found = _in(place, names)
        if found.files:
            break
    return found


def _directories(source: Source, options: Mapping[str, object]) -> Iterator[Location]:
    place = Location(source.path, dict(options))
    yield place if place.kind == "directory" else place.parent
    yield from (place.at(pointer).parent for pointer in source.pointers[:1])


def _in(place: Location, names: Collection[str] | None) -> Companions:
    found: dict[str, File] = {}
    warnings = []
    for name, entry in place.names.items():
        known = is_companion_name(name) or (name in _ASKED_FOR and names is not None and name in names)
        if not known or entry.kind != "file" or (names is not None and name not in names):
            continue
        if entry.file.size > LARGEST:
            warnings.append(f"{entry.file.path} was not copied: it has more than {LARGEST >> 20} MiB.")
        elif _leads_out(place.path, entry.file.path):
            warnings.append(f"{entry.file.path} was not copied: it is a link that leads out of its directory.")
        else:
            found[name] = entry.file
    return Companions(found, tuple(warnings), place.path)


def _leads_out(directory: str, path: str) -> bool:
    if is_remote(path):
        return False
    root, real = os.path.realpath(directory), os.path.realpath(path)
    above, kind = os.path.split(os.path.dirname(root))
    roots = [root, os.path.join(above, _BLOBS)] if kind == _SNAPSHOTS else [root]
    return not any(os.path.commonpath([each, real]) == each for each in roots)


class Config(NamedTuple):
    """What a model's configuration says: the dtype of its weights, "" if none, and the modules of its own code."""

    dtype: str = ""
    code: tuple[str, ...] = ()


def read_config(file: File, options: Mapping[str, object]) -> Config:
    """Return what a configuration says; nothing if it cannot be understood, which is for its reader to say."""
    try:
        told = strict_json.parse(Location(file.path, dict(options)).read_text(_LARGEST_CONFIG))
    except (CkptconvError, ValueError):
        return Config()
    if not isinstance(told, dict):
        return Config()
    dtype = told.get("dtype") or told.get("torch_dtype")
    own = told.get("auto_map")
    named = [text for text in own.values() if isinstance(text, str)] if isinstance(own, dict) else []
    modules = dict.fromkeys(f"{text.split('.')[0]}.py" for text in named if "--" not in text)
    return Config(dtype.removeprefix("torch.") if isinstance(dtype, str) else "", tuple(modules))


def read_configuration(file: File, options: Mapping[str, object]) -> Mapping[str, Any]:
    """Return a config.json whole. Raise CorruptError if it is no JSON object."""
    try:
        told = strict_json.parse(Location(file.path, dict(options)).read_text(_LARGEST_CONFIG))
    except ValueError as error:
        raise CorruptError(f"{file.path} is not JSON: {error}.") from error
    if not isinstance(told, dict):
        raise CorruptError(f"{file.path} is no JSON object.")
    return told


def notes(config: Config, dtype: str) -> list[str]:
    """Return what a user should know of a configuration that is copied beside weights that were cast to `dtype`; "" if
    they were not cast."""
    found = []
    if dtype and config.dtype and dtype != config.dtype:
        found.append(
            f"{CONFIG} says that the weights are {config.dtype}, and they were cast to {dtype}: it is copied as it is. "
            f'Pass dtype="{dtype}" to from_pretrained, or change it there.'
        )
    if config.code:
        found.append(
            f"{CONFIG} names code of the repository, which is not copied: {some(config.code, form=str)}. Whoever loads "
            "the model needs it, and has to trust it."
        )
    return found
