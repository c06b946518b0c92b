"""Assembles parameters, frozen parameters, buffers and states from the records of one model-parallel rank's files.

Every element is accounted for. What a file names must be found. What is found must be named, or be padding of a known
size; anything else is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.deepspeed import partitions as zero_layout
from ckptconv.features.deepspeed.cuts import FUSED, cut_pieces, experts_of
from ckptconv.features.deepspeed.partitions import Shape
from ckptconv.features.deepspeed.records import ModelFile, OptimFile, misfit
from ckptconv.features.deepspeed.states import read_states
from ckptconv.features.deepspeed.weights import Weights
from ckptconv.storage.paths import basename
from ckptconv.tensors.lazy import Concat, LazyTensor, View, same_bytes
from ckptconv.text import count_of

_COPY = "Copy the expert files (layer_*_expert_*_model_states.pt) to the same directory"

if TYPE_CHECKING:
    from ckptconv.features.deepspeed.shapes import Layers

# Reads the model file of a data-parallel rank.
ReadModel = Callable[[int], ModelFile]


def whole(model: ModelFile, where: str, saved: Mapping[str, LazyTensor]) -> Weights:
    """Assemble ZeRO-0: every rank has the whole module, which the model file holds; the expert files hold `saved`."""
    weights = Weights(where, world=model.number("dp_world_size") or 1)
    module = model.module or {}
    names = set(model.buffers or ())
    weights.buffers = {name: tensor for name, tensor in module.items() if name in names}
    weights.trainable = {name: tensor for name, tensor in module.items() if name not in names}
    _note_extras(weights, model)
    _add_experts(weights, model, saved)
    seen: dict[Any, str] = {}
    for name, tensor in list(weights.trainable.items()):
        key = same_bytes(tensor)
        owner = name if key is None else seen.setdefault(key, name)
        if owner != name:
            weights.aliases[name] = owner
            del weights.trainable[name]
    from ckptconv.features.deepspeed.whole_states import read_whole_states  # of few checkpoints

    read_whole_states(weights, model)
    return weights


def is_whole(model: ModelFile) -> bool:
    """Return whether ZeRO-0 wrote this model file, which then needs no optimizer files."""
    stage = model.zero.get("stage", 0)
    # Old releases do not state the stage. Under ZeRO, their model file has None for the optimizer.
    elsewhere = not model.config and "optimizer" in model.values and model.values["optimizer"] is None
    return model.shapes is None and stage == 0 and not elsewhere and "zero_pp_rank" not in basename(model.file.path)


def assemble(
    model: ModelFile,
    optims: Sequence[OptimFile],
    where: str,
    read_model: ReadModel,
    saved: Mapping[str, LazyTensor],
    layers: Layers,
) -> Weights:
    """Assemble ZeRO-1, 2 or 3.

    Parameters and states come from the partitions, the rest from the model files and from `saved`, the content of the
    expert files. `layers` reads the layer files, which may be needed for shapes. Raises CorruptError if files
    contradict each other, UnsupportedError if the weights are elsewhere.
    """
    shapes = model.shapes if model.shapes is not None else optims[0].shapes
    if shapes is None or len(shapes) != len(optims[0].masters):
        from ckptconv.features.deepspeed.shapes import find_shapes  # of early releases, and of ranks that list none

        shapes = find_shapes(model, optims, saved, layers)
    _check_layout(model, optims, shapes, where)
    weights = Weights(where, optims[0].stage, len(optims))
    experts = experts_of(model, optims, shapes)
    if weights.stage == 3:
        groups = [cut_pieces(group, named, optims) for group, named in enumerate(shapes)]
    else:
        from ckptconv.features.deepspeed.flat import cut_flat

        groups = [cut_flat(group, named, optims, where, experts) for group, named in enumerate(shapes)]
    for number, group in enumerate(groups):
        for name, tensor in group.apply([optim.masters[number] for optim in optims]):
            if name in weights.trainable:
                raise CorruptError(f"{model.file.path}: {name!r} occurs in two parameter groups.")
            weights.trainable[name] = tensor
    read_states(weights, groups, optims)
    complete(weights, model, read_model, saved)
    return weights


def complete(
    weights: Weights, model: ModelFile, read_model: ReadModel, saved: Mapping[str, LazyTensor] | None = None
) -> None:
    """Add what lies in the model files: frozen parameters, buffers and aliases; and what only expert files hold.

    `saved` is all that the expert files hold. Raises CorruptError for a name in the model files that cannot be found.
    """
    sharded, saved = weights.stage == 3, saved or {}
    weights.frozen = _frozen_pieces(model, weights.world, read_model) if sharded else _frozen_whole(model)
    module = model.module or {}
    for name in model.buffers or () if model.module is not None else ():
        if name in module:
            weights.buffers[name] = module[name]
        elif not saved or zero_layout.expert_of(name) is None:
            raise CorruptError(f"{model.file.path}: buffer_names lists {name!r}, but module does not contain it.")
    # Tensors without elements have no address, so they all look tied to each other.
    weights.aliases = {
        alias: owner
        for alias, owner in model.shared.items()
        if sharded or alias not in module or module[alias].numel or owner not in module or module[owner].numel
    }
    _note_extras(weights, model)
    known = {*weights.trainable, *weights.frozen, *weights.buffers, *weights.aliases}
    _rest(weights, model, {name: tensor for name, tensor in module.items() if name not in known}, sharded)
    _add_experts(weights, model, saved)
    _check_aliases(weights, model)


def _check_layout(
    model: ModelFile, optims: Sequence[OptimFile], shapes: Sequence[Mapping[str, Shape]], where: str
) -> None:
    """Raise UnsupportedError if weights were offloaded into other files, or experts are cut over fewer ranks."""
    if model.native or any(optim.native for optim in optims):
        raise UnsupportedError(
            f"{where} is an AutoEP checkpoint of ZeRO-3 whose experts are partitioned over fewer ranks than the other "
            "parameters (partition-native), which is not supported.",
            "First convert it to a universal checkpoint with DeepSpeed's ds_to_universal.py.",
        )
    sharded = optims[0].stage == 3
    missing = [
        all(optim.masters[group].numel == 0 for optim in optims) and any(map(math.prod, named.values()))
        for group, named in enumerate(shapes)
    ]
    if missing and (all(missing) or (sharded and any(missing))):
        offload = optims[0].zero.get("offload_optimizer")
        device = offload.get("device") if isinstance(offload, dict) else None
        raise UnsupportedError(
            f"{where} lacks weights: the partitions of {sum(missing)} of {count_of(len(missing), 'flat group')} are "
            f"empty. The weights were offloaded to {'NVMe' if device in (None, 'nvme') else device}, into files that "
            "only the training run can read.",
            "Load the checkpoint in the training run, and save it without offloading to NVMe, or "
            "with stage3_gather_16bit_weights_on_model_save.",
        )


def _note_extras(weights: Weights, model: ModelFile) -> None:
    if model.extras:
        shown = ", ".join(model.extras[:5]) + (", …" if len(model.extras) > 5 else "")
        weights.warnings.append(
            f"{model.file.path}: module contains {count_of(len(model.extras), 'value')} other than tensors: {shown}."
        )


def _frozen_whole(model: ModelFile) -> dict[str, LazyTensor]:
    """Return the frozen parameters of ZeRO-2, which the model file holds whole."""
    frozen = {}
    for name, shape in (model.frozen or {}).items():
        tensor = model.fragments.get(name)
        if tensor is None or tensor.numel != math.prod(shape):
            raise misfit(model.file, f"the frozen parameter {name!r}", tensor, math.prod(shape))
        frozen[name] = tensor if tensor.shape == shape else View(tensor, tensor.dtype, shape)
    return frozen


def _frozen_pieces(model: ModelFile, world: int, read_model: ReadModel) -> dict[str, LazyTensor]:
    """Return the frozen parameters of ZeRO-3, which are cut like trainable ones; each rank's model file has a piece."""
    if not model.frozen:
        return {}
    models = [read_model(rank) for rank in range(world)]
    slices, _ = zero_layout.walk_pieces(model.frozen, world)
    frozen: dict[str, LazyTensor] = {}
    for piece in slices:
        fragments = []
        for rank_model in models:
            fragment = rank_model.fragments.get(piece.name)
            if fragment is None or fragment.numel != piece.piece or len(fragment.shape) != 1:
                missing = f"the part of the frozen parameter {piece.name!r}"
                raise misfit(rank_model.file, missing, fragment, piece.piece)
            fragments.append(fragment)
        frozen.update(zero_layout.cut_pieces([piece._replace(offset=0)], fragments))
    return frozen


def _rest(weights: Weights, model: ModelFile, rest: Mapping[str, LazyTensor], sharded: bool) -> None:
    """Assign the tensors `rest` of the module, which nothing else names.

    ZeRO-1 lists no frozen parameters, and no release lists empty ones: the module holds both whole. Releases before
    0.9.2 list no aliases. Under ZeRO-3 the module holds placeholders: a name that is listed nowhere is lost, unless it
    shares the placeholder of a listed one.
    """
    module = model.module or {}
    listed = [name for name in (*weights.trainable, *weights.frozen) if name in module]
    owners: dict[Any, str] = {same_bytes(module[name]): name for name in listed if module[name].numel}
    if sharded:
        owners |= {("placeholder", model.storages.get(name)): name for name in listed if not module[name].numel}
    for name, tensor in rest.items():
        key = same_bytes(tensor) if tensor.numel else ("placeholder", model.storages.get(name))
        if key in owners:
            weights.aliases[name] = owners[key]
        elif sharded and _is_placeholder(tensor, model):
            weights.unaccounted.append(name)
        elif model.buffers is None and tensor.dtype.kind != "f":
            weights.buffers[name] = tensor
        elif tensor.numel == 0:
            weights.trainable[name] = tensor
        else:
            weights.frozen[name] = tensor


def _is_placeholder(tensor: LazyTensor, model: ModelFile) -> bool:
    """Return whether a tensor is ZeRO-3's placeholder for a parameter: empty, or in old releases of one element."""
    old = model.buffers is not None and (0,) < model.release() < (0, 6)
    return len(tensor.shape) == 1 and (tensor.numel == 0 or (old and tensor.numel == 1))


def _add_experts(weights: Weights, model: ModelFile, saved: Mapping[str, LazyTensor]) -> None:
    """Add what the expert files hold and the partitions do not: frozen experts, buffers, and all experts of ZeRO-0.

    Raises CorruptError unless partitions and expert files have the same experts, and all of them.
    """
    buffers = {(expert.layer, expert.rest) for expert in map(zero_layout.expert_of, model.buffers or ()) if expert}
    parameters = weights.frozen if weights.stage != 0 else weights.trainable
    parts: dict[str, dict[int, LazyTensor]] = {f"{layer.prefix}.{w}": {} for layer in model.fused for w in FUSED}
    for name, tensor in saved.items():
        whole_name, _, number = name.rpartition(".")
        expert = zero_layout.expert_of(name)
        if whole_name in parts and number.isdecimal():
            parts[whole_name][int(number)] = tensor
        elif name not in weights.trainable:
            kind = weights.buffers if expert and (expert.layer, expert.rest) in buffers else parameters
            kind.setdefault(name, tensor)
        elif weights.trainable[name].shape != tensor.shape:
            raise CorruptError(
                f"{weights.where}: {name!r} has the shape {list(weights.trainable[name].shape)} in the partitions, but "
                f"{list(tensor.shape)} in its expert file."
            )
    for name, held in parts.items():
        if held and name not in weights.trainable:
            shapes = {part.shape for part in held.values()}
            if sorted(held) != list(range(len(held))):
                raise CorruptError(
                    f"{weights.where}: the expert files contain the experts {sorted(held)} of {name!r}, but expert "
                    f"numbers from 0 to {len(held) - 1} were expected."
                )
            if len(shapes) != 1:
                raise CorruptError(f"{weights.where}: the experts of {name!r} have the shapes {sorted(shapes)[:2]}.")
            parameters[name] = Concat(tuple(View(held[n], held[n].dtype, (1, *held[n].shape)) for n in sorted(held)))
    for layer in model.fused:
        for name in (f"{layer.prefix}.{w}" for w in FUSED):
            whole = weights.trainable.get(name) or parameters.get(name)
            count = whole.shape[0] if whole is not None and whole.shape else 0
            if count != sum(map(len, layer.experts)):
                expected = sum(map(len, layer.experts))
                raise CorruptError(
                    f"{weights.where}: {name!r} should have {count_of(expected, 'expert')}, but has {count}.",
                    f"{_COPY}." if count < expected else "",
                )
    _check_experts(weights, saved)


def _check_experts(weights: Weights, saved: Mapping[str, LazyTensor]) -> None:
    """Raise CorruptError if a layer lacks an expert, or an expert lacks a tensor that the others have."""
    held: dict[str, dict[str, set[int]]] = {}
    for expert in filter(None, map(zero_layout.expert_of, weights.names())):
        held.setdefault(expert.layer, {}).setdefault(expert.rest, set()).add(expert.number)
    in_files = zero_layout.expert_numbers(saved)
    for layer, parts in held.items():
        where, named = weights.where, layer.rstrip(".")
        everything = set().union(*parts.values())
        lacking = [(rest, everything - numbers) for rest, numbers in parts.items() if numbers != everything]
        gaps = set(range(max(everything) + 1)) - everything
        if gaps:
            raise CorruptError(
                f"{where} lacks expert {min(gaps)} of {named}, but has {count_of(len(everything), 'expert')} up to "
                f"number {max(everything)}."
            )
        if lacking:
            rest, numbers = lacking[0]
            raise CorruptError(
                f"{where}: expert {min(numbers)} of {named} has no {rest.lstrip('.')}, which other experts have.",
                f"{_COPY}: they contain the frozen experts.",
            )
        if saved and in_files.get(layer, set()) != everything:
            odd = ", ".join(map(str, sorted(everything - in_files.get(layer, set()))[:8]))
            raise CorruptError(
                f"{where}: the partitions contain {count_of(len(everything), 'expert')} of {named}, but the expert "
                f"files lack the numbers {odd}."
            )


def _check_aliases(weights: Weights, model: ModelFile) -> None:
    named = {*weights.trainable, *weights.frozen, *weights.buffers}
    for alias, owner in list(weights.aliases.items()):
        if alias in named:
            del weights.aliases[alias]
        elif owner in weights.aliases and weights.aliases[owner] in named:
            weights.aliases[alias] = weights.aliases[owner]
        elif owner not in named:
            # The save left the owner out, as it can leave out frozen parameters.
            if model.frozen is None and model.module is not None and owner not in model.module:
                del weights.aliases[alias]
                own_data = model.module.get(alias)
                if own_data is not None and not (weights.stage == 3 and _is_placeholder(own_data, model)):
                    weights.frozen[alias] = own_data
                else:
                    weights.warnings.append(f"{model.file.path}: {alias!r} is tied to {owner!r}, which was not saved.")
                continue
            raise CorruptError(
                f"{model.file.path}: {alias!r} is tied to {owner!r}, which the checkpoint does not contain."
            )
