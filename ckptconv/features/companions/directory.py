"""The directory of a model: the files in it that are copied with the weights, and the reasons why others stay behind.

In: the names in a directory, local or on a store. Out: the files of these names, by name.

Sources: the names that `save_pretrained` of transformers, diffusers, PEFT and sentence-transformers, open_clip, timm,
Model Optimizer and Megatron-Bridge write, and the repositories of the hub. Code and pickles are never copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckptconv.formats.source import ADAPTER_CONFIG, CONFIG, Source
from ckptconv.storage.location import Location

# Meta's configuration beside Llama's files, read when it is asked for, and not copied; and Model Optimizer's.
PARAMS, QUANTIZED = "params.json", "hf_quant_config.json"
# Files with an entry for each token.
VOCABULARIES = ("tokenizer.json", "vocab.json")


class Row(NamedTuple):
    """Files of a model directory: their names, in which * is any text, the library that they belong to, and their kind.
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


def places_of(source: Source, options: Mapping[str, object]) -> Iterator[Location]:
    """Yield the directory of `source`, that of the file that points to it, and folders in these for other files."""
    place = Location(source.path, dict(options))
    outer = [place if place.kind == "directory" else place.parent]
    outer += [place.at(pointer).parent for pointer in source.pointers[:1]]
    yield from outer
    yield from (near.join(_INNER) for near in outer if _INNER in near.names and near.names[_INNER].kind == "directory")
