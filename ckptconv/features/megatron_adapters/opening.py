"""Open a step that holds adapters with the map of these, if the map of their model was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.errors import CkptconvError, UnsupportedError, UsageError
from ckptconv.features.maps.chosen import ChosenMap
from ckptconv.features.megatron_adapters.deriving import MEGATRON, PEFT, RANKS, derived, with_ranks
from ckptconv.features.megatron_adapters.names import IN, JOINED, adapters_in, are_apart, unmapped
from ckptconv.features.megatron_adapters.settings import configuration, others
from ckptconv.features.megatron_adapters.training import Trained, trained
from ckptconv.features.megatron_adapters.untrained import without_zeros
from ckptconv.features.merge.files import read_adapters
from ckptconv.formats.source import ADAPTER, ADAPTER_CONFIG, Source
from ckptconv.tensors.moves import File
from ckptconv.text import some

_ADVICE = (
    "Specify a PEFT directory from save_pretrained, with an adapter of the same shapes: --like DIR. Its "
    "adapter_config.json is copied."
)


def opened(source: Source, settings: Mapping[str, Any], reaching: Mapping[str, Any]) -> Source:
    """Return `source` with the map of its adapters in the place of that of their model, or with the recorded one;
    unchanged if it has no adapters of Megatron-core, or no map.

    Raise UnsupportedError for adapters that have no map, UsageError if nothing says their alpha.
    """
    chosen = source.computed.get("map")
    if chosen is None or MEGATRON not in chosen.map.sides or not adapters_in(source.weights):
        return source
    if error := unmapped(source.path, source.weights):
        raise error
    stores = reaching.get("storage_options") or {}
    told, is_apart = trained(source.path, stores), are_apart(source.weights)
    if settings.get("map"):
        chosen = derived(chosen, PEFT, source.path, apart=is_apart)
        chosen = with_ranks(chosen, told) if is_apart else chosen
        if is_apart and RANKS not in chosen.sizes:
            raise UsageError(
                f"{source.path} contains adapters of CanonicalLoRA, but does not record the number of "
                "tensor-parallel ranks.",
                f"Specify the number, for example: --size {RANKS}=1",
            )
    source = without_zeros(source, chosen, stores).computing(map=chosen)
    if source.reference is None and told.alpha is not None:
        return _following(source, chosen, told)
    if source.reference is None or source.reference.stem != ADAPTER:
        why = "" if told.alpha is not None else f": {told.why}"
        raise UsageError(
            f"{source.path} contains adapters, and PEFT needs their alpha in {ADAPTER_CONFIG}, but no PEFT adapter is "
            f"given with --like{why}.",
            _ADVICE,
        )
    return _like(source, source.reference, told, reaching)


def _following(source: Source, chosen: ChosenMap, told: Trained) -> Source:
    """Return `source` with the configuration that follows from its training, in the place of that of its model."""
    _check_rank(source, told.dim, f"dim in {told.path}")
    config, untold = configuration(told, chosen.apply(adapters_in(source.weights)).tensors)
    notes = [f"{ADAPTER_CONFIG} was derived from {told.path}: lora_alpha is {told.alpha:g}.", *untold]
    return source._replace(
        companions={ADAPTER_CONFIG: File(f"{told.path}: peft", 0)},
        config=None,
        values={**source.values, ADAPTER_CONFIG: config},
        notes=[*source.notes, *notes],
    )


def _like(source: Source, reference: Source, told: Trained, reaching: Mapping[str, Any]) -> Source:
    """Return `source`, compared with the adapter that the output is to be like, whose configuration it gets."""
    (adapter,) = read_adapters([reference.path], {**reaching, "structure": False})
    if parts := others(adapter):
        raise UnsupportedError(
            f"{reference.path} (--like) contains {some(parts, form=str)}, but no adapter of {source.path} does.",
            _ADVICE,
        )
    scale = adapter.scale
    _check_rank(source, scale.rank, f"r of {reference.path}")
    if told.alpha not in (None, scale.alpha) or told.dim not in (None, scale.rank):
        raise UsageError(
            f"{told.path} specifies dim {told.dim:g} and alpha {told.alpha:g}, but {reference.path} specifies r "
            f"{scale.rank:g} and lora_alpha {scale.alpha:g}.",
            _ADVICE,
        )
    why = told.why or f"{told.path} specifies the same value"
    alpha = f"lora_alpha is {scale.alpha:g}, from {reference.path}: {why}."
    return source._replace(notes=[*source.notes, alpha])


def _check_rank(source: Source, rank: float | None, where: str) -> None:
    """Raise UsageError for an adapter of another rank than the one that is stated `where`."""
    for name, tensor in adapters_in(source.weights).items():
        if name.endswith(IN) and tensor.shape[0] != rank:
            raise UsageError(
                f"{name} of {source.path} has the rank {tensor.shape[0]}, but {where} is {rank:g}.", _ADVICE
            )


def advise(error: CkptconvError, path: str, options: Mapping[str, Any]) -> None:
    """Say which adapters of PEFT have no place in a step, if copies of a factor differ."""
    if IN in error.message and "stored twice" in error.message:
        error.hint = JOINED
