"""Give a checkpoint the configuration that the arguments of its training say, if a map leads to transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.features.megatron_core.arguments import EMBEDDINGS, HEAD, configuration
from ckptconv.features.megatron_core.fsdp import FSDP
from ckptconv.formats import companions
from ckptconv.formats.registered import MEGATRON
from ckptconv.formats.source import CONFIG, Source
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import File
from ckptconv.text import some

_OF_MAPS = "megatron-"
_ADVICE = "Give the model's own with --config or --like."


def opened(source: Source, settings: Mapping[str, Any], reaching: Mapping[str, Any]) -> Source:
    """Return `source` with a configuration derived from its arguments; unchanged if it has another one, or the map is
    none from Megatron-core's names."""
    name, sizes, recorded = settings.get("map") or "", settings.get("size") or {}, settings.get("recorded")
    if recorded and not name:
        name, sizes = recorded.map.name, {**recorded.sizes, **sizes}
    map_name = name.partition(":")[0]
    if (
        source.format not in (MEGATRON, FSDP)
        or not map_name.startswith(_OF_MAPS)
        or settings.get("config")
        or source.reference
    ):
        return source
    if companions.read_files(source, reaching.get("storage_options") or {}, CONFIG):
        return source
    common = source.weights.get("common")
    args = common.get("args") if isinstance(common, Mapping) else None
    if not isinstance(args, Mapping):
        why = "it has no arguments of Megatron-LM, and a run_config.yaml of Megatron-Bridge is not read"
        return _noting(source, f"No config.json was derived for {source.path}: {why}. {_ADVICE}")
    derived = configuration(args, map_name)
    if derived.config is None:
        return _noting(source, f"No config.json was derived for {source.path}: {derived.reason}. {_ADVICE}")
    config = {**derived.config, **_of_weights(source, args, sizes)}
    untold = some(derived.untold, form=str)
    note = (
        "With --copy-config or --for-hub, config.json follows from the arguments of the training, which do not say "
        f"{untold}."
    )
    file = File(f"{source.path}: args", 0)
    return _noting(source, note)._replace(companions={**source.companions, CONFIG: file}, config=config)


def _noting(source: Source, note: str) -> Source:
    return source._replace(notes=[*source.notes, note])


def _of_weights(source: Source, args: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the keys that the weights say: the vocabulary without its padding, whether the head is tied, the dtype."""
    embeddings = source.weights.get(EMBEDDINGS)
    keys: dict[str, Any] = {"tie_word_embeddings": HEAD not in source.weights}
    if isinstance(embeddings, LazyTensor):
        rows, own = embeddings.shape[0], args.get("vocab_size")
        entries = own if type(own) is int and 0 < own <= rows else rows
        keys["vocab_size"] = sizes.get("v", rows - sizes["_"] if "_" in sizes else entries)
        keys["torch_dtype"] = embeddings.dtype.name
    return keys
