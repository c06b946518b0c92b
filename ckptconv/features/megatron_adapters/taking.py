"""Fit an adapter of PEFT to a step of Megatron-core: with the map of its adapters, in the form of LoRA or of
CanonicalLoRA, and settings as in the step that the output is to be like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.features.companions import reading
from ckptconv.features.megatron_adapters.deriving import MEGATRON, RANKS, derived, with_ranks
from ckptconv.features.megatron_adapters.names import JOINED, adapters_in, are_apart, matrix_of
from ckptconv.features.megatron_adapters.settings import layers_in, others
from ckptconv.features.megatron_adapters.training import Trained, trained
from ckptconv.features.megatron_adapters.untrained import modules_of, zeros_of
from ckptconv.features.merge.files import read_adapters
from ckptconv.formats.adapter_names import is_adapter
from ckptconv.formats.detect import open_source
from ckptconv.formats.source import ADAPTER_CONFIG, Source
from ckptconv.formats.values import first_bytes
from ckptconv.options.table import Options
from ckptconv.storage.paths import normalize
from ckptconv.tensors.lazy import Equal, LazyTensor
from ckptconv.text import count_of, some

_FSDP = "megatron-fsdp"
_ADVICE = "Specify a step of a training run with the same settings."
# The bytes that are compared of each factor, to tell which form an adapter needs.
_COMPARED = 1 << 20
_MERGING = "Add the adapter to its model with ckptconv merge."


def fitted(source: Source, options: Options) -> Source:
    """Return `source` with the map of its adapters in the place of that of their model; unchanged if it has no adapters
    of PEFT, or no map to Megatron-core's names.

    Raise UnsupportedError for adapters that Megatron-Bridge does not have, UsageError for other ones, or other
    settings, than those of the step that the output is to be like.
    """
    chosen, weights = source.computed.get("map"), source.weights
    if chosen is None or MEGATRON not in chosen.map.sides or not (isinstance(weights, Mapping) and is_adapter(weights)):
        return source
    form, joined = "LoRA", derived(chosen, MEGATRON, source.path)
    if options.to == _FSDP:
        raise UnsupportedError(f"{source.path} contains adapters, but {_FSDP} supports models only.", _MERGING)
    (adapter,) = read_adapters([source.path], {**options.reaching(), "structure": False})
    if parts := others(adapter):
        raise UnsupportedError(
            f"{source.path} contains {some(parts, form=str)}, which no adapter of Megatron-Bridge has.", _MERGING
        )
    zeros = zeros_of(source, chosen)
    weights = {**weights, **zeros}
    try:
        applied = joined.apply(weights)
    except UsageError as error:
        error.hint = error.hint or JOINED
        raise
    like = options.fitting().get("like")
    step = open_source(normalize(like), structure=False, unstack=True, **options.reaching()) if like else None
    told = trained(step.path, options.storage_options) if step else Trained(why="the step does not specify them")
    if step and zeros and not are_apart(step.weights):
        raise UsageError(
            f"{source.path} has no adapters of {modules_of(zeros)}, but {step.path} is a LoRA step, which adapts "
            "these modules together with others.",
            JOINED,
        )
    if are_apart(step.weights) if step else zeros or _differ(applied.equal, options.storage_options):
        joined = with_ranks(derived(chosen, MEGATRON, source.path, apart=True), told)
        joined = joined if RANKS in joined.sizes else with_ranks(joined, Trained(ranks=1))
        form = f"CanonicalLoRA, for {count_of(joined.sizes[RANKS], 'tensor-parallel rank')} (--size {RANKS}=N)"
    tensors = joined.apply(weights).tensors
    layers, of_model = len(layers_in(tensors)), chosen.config.get("num_hidden_layers", 0)
    if of_model and layers != of_model:
        raise UnsupportedError(
            f"{source.path} has adapters of {count_of(layers, 'layer')}, but its model has "
            f"{count_of(of_model, 'layer')}. In a step, one tensor contains the adapters of all layers.",
            _MERGING,
        )
    ((_, config),) = reading.configurations(source, options.storage_options, ADAPTER_CONFIG)
    stated = {"dim": adapter.scale.rank, "alpha": adapter.scale.alpha, "dropout": config.says.get("lora_dropout") or 0}
    why = _compared(source, tensors, step, stated, told) if step else told.why
    modules = list(dict.fromkeys(matrix_of(name).rpartition(".")[2] for name in tensors))
    notes = [
        f"Train its adapters with {_words(stated)}, from {config.file.path}: {why}.",
        f"The adapters have the form {form}, with the target_modules {some(modules, len(modules), str)}.",
    ]
    if zeros:
        notes.append(
            f"{source.path} does not adapt {modules_of(zeros)}, but Megatron-Bridge needs their factors. Zeros were "
            "written for them: these have no effect, and training does not change them."
        )
    return source.computing(map=joined)._replace(weights=weights, notes=[*source.notes, *notes])


def _differ(pairs: Sequence[Equal], stores: Mapping[str, Any]) -> bool:
    """Return whether any first factors that LoRA would share differ, by their beginnings."""
    beginnings = ([first_bytes(tensor, _COMPARED, stores)[0] for tensor in pair] for _, *pair in pairs)
    return any(first != other for first, other in beginnings)


def _compared(
    source: Source, tensors: Mapping[str, LazyTensor], step: Source, stated: Mapping[str, Any], told: Trained
) -> str:
    """Return what the step that the output is to be like, trained as `told`, says of the settings `stated`. Raise
    UsageError for another step than one with adapters of the same shapes and settings."""
    there = {name: tensor.shape for name, tensor in adapters_in(step.weights).items()}
    here = {name: tensor.shape for name, tensor in tensors.items()}
    differing = [name for name in here | there if here.get(name) != there.get(name)]
    if differing:
        shapes = [f"{name} ({here.get(name, 'none')} and {there.get(name, 'none')})" for name in differing]
        raise UsageError(
            f"The adapters of {source.path} and {step.path} differ in shape: {some(shapes, form=str)}.", _ADVICE
        )
    if told.dim is None:
        return told.why
    theirs = {"dim": told.dim, "alpha": told.alpha, "dropout": told.dropout}
    if theirs != stated:
        raise UsageError(
            f"{told.path} specifies {_words(theirs)}, but {ADAPTER_CONFIG} of {source.path} specifies "
            f"{_words(stated)}.",
            _ADVICE,
        )
    matrices = {matrix_of(name) for name in tensors}
    untrained = [matrix for matrix in sorted(matrices) if told.modules and not _is_in(matrix, told.modules)]
    if untrained:
        raise UsageError(
            f"{source.path} adapts {some(untrained, form=str)}, but target_modules of {told.path} lists only "
            f"{some(told.modules)}.",
            _ADVICE,
        )
    return f"{told.path} specifies the same values"


def _is_in(matrix: str, modules: Sequence[str]) -> bool:
    """Return whether the module `matrix` is one of `modules`, which are names, ends of names, and patterns with *."""
    return any(fnmatchcase(matrix, f"*{module}") for module in modules)


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())
