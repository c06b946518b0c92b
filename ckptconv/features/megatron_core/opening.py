"""Give a checkpoint the configuration that the arguments of its training say, if a map leads to transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.features.companions import reading
from ckptconv.features.megatron_core.arguments import ADAPTER, EMBEDDINGS, HEAD, PADDED, Configured, configuration
from ckptconv.features.megatron_core.fsdp import FSDP
from ckptconv.formats.registered import MEGATRON
from ckptconv.formats.source import CONFIG, Source
from ckptconv.process import of_feature
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import File
from ckptconv.text import some

_OF_MAPS = "megatron-"
# A feature that knows where else the arguments of a training are, and the module that has `stated`.
_ELSEWHERE = "megatron_bridge", "properties"


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
        or reading.read_files(source, reaching.get("storage_options") or {}, CONFIG)
    ):
        return source
    common = source.weights.get("common")
    args = common.get("args") if isinstance(common, Mapping) else None
    where, said, note, why = f"{source.path}: args", "the arguments of the training, which do not specify", "", ""
    if not isinstance(args, Mapping):
        module = of_feature(*_ELSEWHERE)
        if module:
            args, path, note, why = module.stated(source.path, reaching.get("storage_options") or {})
            where, said = f"{path}: model", f"{path}, which does not specify"
    lacking = Configured(None, reason=f"it has no arguments of Megatron-LM{why and f', and {why}'}")
    derived = configuration(args, map_name) if args else lacking
    has_model = any(isinstance(leaf, LazyTensor) and ADAPTER not in name for name, leaf in source.weights.items())
    prefixes = [name.removesuffix(EMBEDDINGS) for name in source.weights if f".{name}".endswith(f".{EMBEDDINGS}")]
    if derived.config is not None and has_model and len(prefixes) != 1:
        reason = f"{len(prefixes) or 'no'} tensors are called {EMBEDDINGS}, but exactly one was expected"
        derived = Configured(None, reason=reason)
    if derived.config is None:
        note = f"No config.json was derived for {source.path}: {derived.reason}."
        return _noting(source, f"{note} Specify the model's configuration with --config or --like.")
    keys, untold = _of_weights(source, args or {}, sizes, *prefixes)
    keys_untold = some((*derived.untold, *untold), form=str)
    note = (
        f"config.json, which --copy-config and --for-hub write, was derived from {said} {keys_untold}. {note}".rstrip()
    )
    config, files = {**derived.config, **keys}, {**source.companions, CONFIG: File(where, 0)}
    return (_noting(source, note) if has_model else source)._replace(companions=files, config=config)


def _noting(source: Source, note: str) -> Source:
    return source._replace(notes=[*source.notes, note])


def _of_weights(
    source: Source, args: Mapping[str, Any], sizes: Mapping[str, int], prefix: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that the weights say: the vocabulary without its padding, whether the head is tied, the dtype;
    and the size of the vocabulary, if its padding is not the one that the arguments say. The names of tensors begin
    with `prefix`, which options may remove."""
    embeddings = source.weights.get(f"{prefix}{EMBEDDINGS}")
    keys: dict[str, Any] = {"tie_word_embeddings": f"{prefix}{HEAD}" not in source.weights}
    if not isinstance(embeddings, LazyTensor):
        return keys, []
    rows, own, padded = embeddings.shape[0], args.get("vocab_size"), args.get(PADDED)
    entries = sizes.get("v", rows - sizes["_"] if "_" in sizes else None)
    is_own = type(own) is int and 0 < own <= rows and padded in (None, rows)
    keys["vocab_size"] = entries or (own if is_own else rows)
    keys["torch_dtype"] = embeddings.dtype.name
    return keys, [] if is_own or entries else ["vocab_size"]
