"""Companions: the small files beside a checkpoint that `from_pretrained` needs as well, such as config.json.

Source: transformers' and diffusers' names for what `save_pretrained` writes. Only files of data are companions: no code
and no pickles.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError
from ckptconv.formats.source import ADAPTER, Source
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.tensors.moves import File
from ckptconv.text import some

CONFIG = "config.json"
# PEFT's, beside the weights of an adapter.
ADAPTER_CONFIG = "adapter_config.json"
# Meta's configuration beside Llama's files, read when it is asked for, and not copied; and Model Optimizer's.
PARAMS, QUANTIZED = "params.json", "hf_quant_config.json"
# Configurations of models, their parts, pipelines and schedulers, those of sentence-transformers and of open_clip, the
# files of tokenizers, those of processors of images and sound, and what says whose it is.
_JSON = (
    "config model_index scheduler_config generation_config hf_quant_config "
    "modules config_sentence_transformers sentence_bert_config sentence_roberta_config sentence_distilbert_config "
    "sentence_camembert_config sentence_albert_config sentence_xlm-roberta_config sentence_xlnet_config router_config "
    "lstm_config cnn_config wordembedding_config whitespacetokenizer_config phrasetokenizer_config open_clip_config "
    "tokenizer tokenizer_config special_tokens_map added_tokens vocab chat_template "
    "preprocessor_config processor_config image_processor_config video_preprocessor_config"
)
_OTHERS = (
    "vocab.txt vocab.bpe merges.txt chat_template.jinja tokenizer.model spiece.model sentencepiece.model "
    "sentencepiece.bpe.model spm.model source.spm target.spm README.md "
    "LICENSE LICENSE.md LICENSE.txt NOTICE NOTICE.md NOTICE.txt"
)
NAMES = frozenset([*(f"{stem}.json" for stem in _JSON.split()), *_OTHERS.split(), ADAPTER_CONFIG])
# The largest file that is copied, in bytes. The largest tokenizers have some 35 MB.
LARGEST = 64 << 20
# Directories of huggingface_hub's cache, beside each other: the links in the first lead to files in the second.
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


class Companions(NamedTuple):
    """The companions of a checkpoint by name, what a user should know of files that are none, and their directory."""

    files: Mapping[str, File]
    warnings: tuple[str, ...] = ()
    directory: str = ""


def is_companion_name(name: str) -> bool:
    """Whether a file of that name may be a companion."""
    return name in NAMES


def together(source: Source, options: Mapping[str, object], names: Collection[str] | None = None) -> dict[str, File]:
    """Return the companions of `source` and of its reference, of these `names` if they are given; of those that both
    have, the reference's."""
    both = [source, source.reference] if source.reference else [source]
    return {name: file for one in both for name, file in siblings(one, options, names).files.items()}


def siblings(
    source: Source,
    options: Mapping[str, object],
    names: Collection[str] | None = None,
    copied: Collection[str] = NAMES,
) -> Companions:
    """Return the companions of `source`: in its directory, or if none are there, in the one with the file that points
    to it. If `names` are given, only these, to be read: through links, as weights are. Raise CorruptError for one of
    them that is no file.

    Those that it has already go first. What is `copied` as it stands lies in the directory: a file that is too large,
    or a link that leads out, is no companion then. But links of huggingface_hub's cache lead to the same repository.
    """
    found = Companions({})
    if source.stem != ADAPTER:
        # Beside a model, loaders would take it for a request for the adapter.
        copied = {*copied} - {ADAPTER_CONFIG}
    for place in _directories(source, options):
        found = _in(place, names, copied)
        if found.files:
            break
    own = {name: file for name, file in source.companions.items() if name in (copied if names is None else names)}
    return found._replace(files={**found.files, **own})


def _directories(source: Source, options: Mapping[str, object]) -> Iterator[Location]:
    place = Location(source.path, dict(options))
    yield place if place.kind == "directory" else place.parent
    yield from (place.at(pointer).parent for pointer in source.pointers[:1])


def _in(place: Location, names: Collection[str] | None, copied: Collection[str]) -> Companions:
    found: dict[str, File] = {}
    warnings = []
    for name, entry in place.names.items():
        if name not in (copied if names is None else names):
            continue
        if entry.kind != "file":
            why = "a broken link" if entry.kind == "missing" else "no file"
            if names is not None:
                raise CorruptError(f"{place.join(name)} is {why}, but has to be read.", "Copy it again, or remove it.")
            warnings.append(f"{place.join(name)} was not copied: it is {why}.")
        elif names is not None:
            found[name] = entry.file
        elif entry.file.size > LARGEST:
            warnings.append(f"{entry.file.path} was not copied: it is larger than {LARGEST >> 20} MiB.")
        elif _leads_out(place.path, entry.file.path):
            warnings.append(f"{entry.file.path} was not copied: it is a link to a file outside its directory.")
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


def with_files(source: Source, files: Mapping[str, File], options: Mapping[str, object]) -> Source:
    """Return `source` with these companions, and with what the configuration among them says. Raise CorruptError if it
    is none."""
    from ckptconv.formats import configs

    config = configs.read(Location(files[CONFIG].path, dict(options))) if CONFIG in files else None
    return source._replace(companions=files, config=config)


def notes(config: Mapping[str, Any], dtype: str) -> list[str]:
    """Return what a user should know of a configuration that is copied beside weights that were cast to `dtype`; "" if
    they were not cast."""
    from ckptconv.formats import configs

    found = []
    said = configs.dtype_of(config)
    if dtype and said and dtype != said:
        found.append(f"{CONFIG} was changed from {said} to {dtype}, the dtype that the weights were cast to.")
    own = config.get("auto_map")
    named = [text for text in own.values() if isinstance(text, str)] if isinstance(own, dict) else []
    code = dict.fromkeys(f"{text.split('.')[0]}.py" for text in named if "--" not in text)
    if code:
        found.append(
            f"{CONFIG} names code of the repository, which was not copied: {some(code, form=str)}. Loading the model "
            "needs this code, and runs it."
        )
    return found
