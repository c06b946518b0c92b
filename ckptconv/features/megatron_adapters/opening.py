"""Open a step that holds adapters with the map of these, if the map of their model was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.features.megatron_adapters.deriving import MAPS, MEGATRON, PEFT, of_adapters
from ckptconv.features.megatron_adapters.names import IN, is_adapter, unmapped
from ckptconv.features.megatron_adapters.training import trained
from ckptconv.features.merge.files import Adapter, read_adapters
from ckptconv.formats.source import ADAPTER, Source
from ckptconv.text import some

_ADVICE = (
    "Give a directory of PEFT with an adapter of the same shapes, as its save_pretrained writes it: --like DIR. Its "
    "adapter_config.json is copied."
)


def opened(source: Source, settings: Mapping[str, Any], reaching: Mapping[str, Any]) -> Source:
    """Return `source` with the map of its adapters in the place of that of their model; unchanged if it has no
    adapters of Megatron-core, or a map that is not built in.

    Raise UnsupportedError for adapters that have no map, UsageError without a reference that says their alpha.
    """
    chosen = source.computed.get("map")
    names = source.weights if isinstance(source.weights, Mapping) else {}
    if not settings.get("map") or chosen is None or MEGATRON not in chosen.map.sides or not is_adapter(names):
        return source
    if error := unmapped(source.path, names):
        raise error
    if chosen.map.name not in MAPS or chosen.target not in ("", PEFT):
        raise UnsupportedError(
            f"{source.path} has adapters, for which there is no map {settings['map']} to PEFT's names.",
            f"The maps with one are {some(MAPS, form=str)}.",
        )
    reference = source.reference
    if reference is None or reference.stem != ADAPTER:
        raise UsageError(
            f"{source.path} has adapters, and nothing says their alpha, which PEFT needs in adapter_config.json.",
            _ADVICE,
        )
    (adapter,) = read_adapters([reference.path], {**reaching, "structure": False})
    if others := [*_others(adapter)]:
        raise UnsupportedError(
            f"{reference.path}, to be like, has {some(others, form=str)}, which no adapter of {source.path} has.",
            _ADVICE,
        )
    scale = adapter.scale
    for name, tensor in source.weights.items():
        if name.endswith(IN) and tensor.shape[:1] != (int(scale.rank),):
            raise UsageError(
                f"{name} of {source.path} has the rank {tensor.shape[0]}, but r of {reference.path} is {scale.rank:g}.",
                _ADVICE,
            )
    told = trained(source.path, reaching.get("storage_options") or {})
    if told.alpha not in (None, scale.alpha) or told.dim not in (None, scale.rank):
        raise UsageError(
            f"{told.path} says dim {told.dim:g} and alpha {told.alpha:g}, but {reference.path} says r {scale.rank:g} "
            f"and lora_alpha {scale.alpha:g}.",
            _ADVICE,
        )
    why = told.why or f"{told.path} says the same"
    alpha = f"lora_alpha is {scale.alpha:g}, as {reference.path} says: {why}."
    return source.computing(map=replace(chosen, map=of_adapters(chosen.map)))._replace(notes=[*source.notes, alpha])


def _others(adapter: Adapter) -> Iterator[str]:
    """Yield the parts of an adapter of PEFT that Megatron-Bridge has none of."""
    scale = adapter.scale
    parts = {
        "use_dora": scale.dora,
        "use_rslora": scale.rooted,
        "fan_in_fan_out": adapter.turned,
        "rank_pattern": scale.ranks,
        "alpha_pattern": scale.alphas,
        "target_parameters": adapter.parameters,
        "modules_to_save": adapter.saved,
        "trainable_token_indices": adapter.tokens,
        "lora_bias": adapter.has_bias,
    }
    yield from (name for name, value in parts.items() if value)
