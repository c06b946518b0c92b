"""The directory of a model: the files in it that are copied with the weights, and the reasons why others stay behind.

In: the names in a directory, local or on a store. Out: the files of these names, by name.

Sources: the names that `save_pretrained` of transformers, diffusers, PEFT and sentence-transformers, open_clip, timm,
Model Optimizer and Megatron-Bridge write, and the repositories of the hub. Code and pickles are never copied.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from ckptconv.formats.registered import is_companion_name
from ckptconv.formats.source import ADAPTER, ADAPTER_CONFIG, CONFIG, Source
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import Entry
from ckptconv.tensors.moves import File

# Meta's configuration beside Llama's files, read when it is asked for, and not copied; and Model Optimizer's.
PARAMS, QUANTIZED = "params.json", "hf_quant_config.json"
# Files with an entry for each token.
VOCABULARIES = ("tokenizer.json", "vocab.json")


class Row(NamedTuple):
    """Files of a model directory: their names, in which * is any text, the library whose they are, and what each is.
    `stays` is the reason why they are not copied with the weights; "" if they are."""

    names: str
    library: str
    role: str
    stays: str = ""


ROWS = (
    Row(f"{CONFIG} generation_config.json open_clip_config.json", "transformers, timm, open_clip", "configuration"),
    Row(ADAPTER_CONFIG, "PEFT", "configuration"),
    Row(QUANTIZED, "Model Optimizer", "quantization"),
    Row(
        f"{' '.join(VOCABULARIES)} tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.json "
        "vocab.txt vocab.bpe merges.txt chat_template.jinja tokenizer.model spiece.model sentencepiece.model "
        "sentencepiece.bpe.model spm.model source.spm target.spm",
        "transformers",
        "tokenizer",
    ),
    Row(
        "preprocessor_config.json processor_config.json image_processor_config.json video_preprocessor_config.json",
        "transformers",
        "processor of images and sound",
    ),
    Row("README.md LICENSE LICENSE.md LICENSE.txt NOTICE NOTICE.md NOTICE.txt", "the hub", "description, license"),
)
_INNER = "huggingface"  # verl's folder for them, beside ranks
# The largest file that is copied, in bytes. The largest tokenizers have some 35 MB.
LARGEST = 64 << 20
# Directories of huggingface_hub's cache, beside each other: the links in the first lead to files in the second.
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def places_of(source: Source, options: Mapping[str, object]) -> Iterator[Location]:
    """Yield the directory of `source`, that of the file that points to it, and folders in these for other files."""
    place = Location(source.path, dict(options))
    outer = [place if place.kind == "directory" else place.parent]
    outer += [place.at(pointer).parent for pointer in source.pointers[:1]]
    yield from outer
    yield from (near.join(_INNER) for near in outer if _INNER in near.names and near.names[_INNER].kind == "directory")


class Companions(NamedTuple):
    """Files of a model directory that are copied, by name; reasons why others of such names are not; and its path."""

    files: Mapping[str, File]
    stays: Mapping[str, str] = {}
    directory: str = ""


def companions_of(source: Source, options: Mapping[str, object], names: Collection[str] | None = None) -> Companions:
    """Return the companions of `source`, of these `names` if they are given, in the first of its places with any.

    Those that it has already go first. A file that is too large, or a link that leads out of the directory, is none.
    But links of huggingface_hub's cache lead to the same repository.
    """

    def is_one(name: str) -> bool:
        if name == ADAPTER_CONFIG and source.stem != ADAPTER:
            # Beside a model, loaders would take it for a request for the adapter.
            from ckptconv.formats.adapter_names import are_factors

            return are_factors(source.weights)
        return is_companion_name(name) if names is None else name in names

    for place in places_of(source, options):
        near = {name: entry for name, entry in place.names.items() if is_one(name)}
        unfit = {name: not_file(entry) or _unfit(place.path, entry.file) for name, entry in near.items()}
        files = {name: entry.file for name, entry in near.items() if not unfit[name]}
        if files:
            break
    own = {name: file for name, file in source.companions.items() if is_one(name)}
    return Companions({**files, **own}, {name: f"it is {why}" for name, why in unfit.items() if why}, place.path)


def not_file(entry: Entry) -> str:
    """Return what an entry of a directory is, if it is no file; else ""."""
    return {"file": "", "missing": "a broken link"}.get(entry.kind, "no file")


def _unfit(directory: str, file: File) -> str:
    """Return what keeps a file in `directory` from being copied; "" if nothing does."""
    if file.size > LARGEST:
        return f"larger than {LARGEST >> 20} MiB"
    if is_remote(file.path):
        return ""
    root, real = os.path.realpath(directory), os.path.realpath(file.path)
    above, kind = os.path.split(os.path.dirname(root))
    roots = [root, os.path.join(above, _BLOBS)] if kind == _SNAPSHOTS else [root]
    is_inside = any(os.path.commonpath([inner, real]) == inner for inner in roots)
    return "" if is_inside else "a link to a file outside its directory"
