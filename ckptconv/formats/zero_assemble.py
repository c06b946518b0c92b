"""From the records of one model-parallel rank's files to its parameters, frozen parameters, buffers and states.

Every element is accounted for: what a file names must be found, and what is found must be named, be padding whose
size is known, or be an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.storage import basename
from ckptconv.tensors import LazyTensor, View, same_bytes, untagged

from . import zero_layout
from .zero_layout import Shape, Slice
from .zero_records import ModelFile, OptimFile

# Reads the model file of another data-parallel rank.
ReadModel = Callable[[int], ModelFile]


@dataclass
class Weights:
    """What one model-parallel rank holds, by kind; `states` are the optimizer states by parameter, `groups` the
    optimizer's param_groups with names for parameters."""

    where: str
    stage: int | None = 0
    world: int = 1
    buffers: dict[str, LazyTensor] = field(default_factory=dict)
    frozen: dict[str, LazyTensor] = field(default_factory=dict)
    trainable: dict[str, LazyTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    unaccounted: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # Pairs of tensors that are stored twice and must be equal, by name.
    equal: list[tuple[str, LazyTensor, LazyTensor]] = field(default_factory=list)

    def state_dict(self) -> dict[str, LazyTensor]:
        """Names in the order in which DeepSpeed's own tool lists them."""
        weights = {**self.buffers, **self.frozen, **self.trainable}
        weights.update((alias, weights[owner]) for alias, owner in self.aliases.items())
        return weights

    def optimizer(self) -> dict[str, Any] | None:
        """The optimizer's state dict, with names for parameters; None where the checkpoint has none."""
        if not any(self.states.values()):
            return None
        return {"state": self.states, "param_groups": self.groups}

    def counts(self) -> dict[str, int]:
        counts = {
            "trainable": len(self.trainable),
            "frozen": len(self.frozen),
            "buffers": len(self.buffers),
            "aliases": len(self.aliases),
        }
        return {kind: count for kind, count in counts.items() if count}

    def experts(self) -> dict[str, set[int]]:
        """The numbers of the experts found, by the prefix of their names."""
        return zero_layout.expert_numbers(list(self.trainable))

    def without_frozen(self) -> None:
        """Leave the frozen parameters out, and what is tied to them."""
        self.aliases = {alias: owner for alias, owner in self.aliases.items() if owner not in self.frozen}
        self.frozen = {}


# ----------------------------------------------------------------------------------------------------- partitions


@dataclass(frozen=True)
class _Cut:
    """How to cut one copy of a group out of the partitions of `ranks`; `names` are those of the result."""

    slices: list[Slice]
    ranks: list[int]
    names: Mapping[str, str]
    pieces: bool

    def apply(self, partitions: Sequence[LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
        """The parameters in `partitions`, one for every data-parallel rank."""
        cut = zero_layout.cut_pieces if self.pieces else zero_layout.cut_flat
        for name, tensor in cut(self.slices, [partitions[rank] for rank in self.ranks]):
            yield self.names[name], tensor


def _cut_pieces(group: int, shapes: Mapping[str, Shape], optims: Sequence[OptimFile]) -> list[_Cut]:
    """ZeRO-3: every rank holds a piece of every parameter of the sub-group."""
    slices, end = zero_layout.walk_pieces(shapes, len(optims))
    for optim in optims:
        if optim.masters[group].numel != end:
            raise CorruptError(
                f"{optim.file.path}: flat group {group} has {optim.masters[group].numel} elements, and the shapes of "
                "its "
                f"{len(shapes)} parameters, cut for {len(optims)} ranks, give {end}."
            )
    return [_Cut(slices, list(range(len(optims))), {name: name for name in shapes}, pieces=True)]


def _cut_flat(group: int, shapes: Mapping[str, Shape], optims: Sequence[OptimFile], where: str) -> list[_Cut]:
    """ZeRO-1 and 2: the ranks that share the group hold consecutive parts of one flat vector."""
    first, world = optims[0], len(optims)
    alignments = first.alignments[group] if group < len(first.alignments) else []
    if alignments and len(alignments) != len(shapes):
        raise CorruptError(
            f"{first.file.path}: param_alignment_paddings has {len(alignments)} entries for group {group}, which has "
            f"{len(shapes)} parameters."
        )
    slices, end = zero_layout.walk_flat(shapes, alignments)
    count = (first.counts[group] if group < len(first.counts) else 0) or world
    if world % count:
        raise CorruptError(f"{first.file.path}: group {group} is shared by {count} ranks, which do not divide {world}.")
    copies = zero_layout.ranks_of_group(world, count)
    for ranks in copies:
        held = sum(optims[rank].masters[group].numel for rank in ranks)
        needed = slices[-1].offset + math.prod(slices[-1].shape) if slices else 0
        # The flat vector is padded to twice the ranks; most releases strip that again. No more is ever left over.
        if not needed <= held <= max(end, -(-end // (2 * count)) * 2 * count):
            raise CorruptError(
                f"{where}: group {group} has {held} elements on its {count} ranks ({basename(first.file.path)} and its "
                f"like), and its {len(shapes)} parameters with their padding take {end}."
            )
        _check_ranks(group, slices, [optims[rank] for rank in ranks])
    return [
        _Cut(
            slices,
            ranks,
            zero_layout.expert_names(list(shapes), ep_rank) if len(copies) > 1 else {name: name for name in shapes},
            pieces=False,
        )
        for ep_rank, ranks in enumerate(copies)
    ]


def _check_ranks(group: int, slices: Sequence[Slice], optims: Sequence[OptimFile]) -> None:
    """Check what every rank says of its own partition against where the walk puts it."""
    size = max(optim.masters[group].numel for optim in optims)
    for index, optim in enumerate(optims):
        held = optim.masters[group].numel
        padding = optim.paddings[group] if group < len(optim.paddings) else size - held
        if held not in (size, max(size - padding, 0)):
            raise CorruptError(
                f"{optim.file.path}: its partition of group {group} has {held} elements and a padding of {padding}, "
                "and "
                f"the others have {size}."
            )
        zero = optim.config.get("zero_optimization")
        if group >= len(optim.fragments) or not isinstance(zero, dict) or zero.get("round_robin_gradients"):
            continue  # under round robin the file says where parameters would have been
        for piece in slices:
            said = optim.fragments[group].get(piece.name)
            low = max(piece.offset - index * size, 0)
            high = min(piece.offset + math.prod(piece.shape) - index * size, size)
            if said is not None and said != (low, high - low):
                raise CorruptError(
                    f"{optim.file.path}: param_slice_mappings puts {piece.name!r} at element {said[0]} with {said[1]} "
                    f"elements, and the shapes put it at {low} with {high - low}."
                )


# ------------------------------------------------------------------------------------------------------- assembly


def whole(model: ModelFile, where: str) -> Weights:
    """ZeRO-0: every rank has the whole module, and the model file holds it."""
    if model.module is None or model.shapes is not None or "zero_pp_rank" in basename(model.file.path):
        raise CorruptError(
            f"{where} lacks its *_optim_states.pt files, which hold the master weights: there are only model files.",
            "Copy them beside the others; a model file alone converts with pt2safetensors --key module.",
        )
    weights = Weights(where)
    names = set(model.buffers or ())
    weights.buffers = {name: tensor for name, tensor in model.module.items() if name in names}
    weights.trainable = {name: tensor for name, tensor in model.module.items() if name not in names}
    _note_extras(weights, model)
    seen: dict[Any, str] = {}
    for name, tensor in list(weights.trainable.items()):
        key = same_bytes(tensor)
        owner = name if key is None else seen.setdefault(key, name)
        if owner != name:
            weights.aliases[name] = owner
            del weights.trainable[name]
    _whole_states(weights, model)
    return weights


def _whole_states(weights: Weights, model: ModelFile) -> None:
    """The optimizer of ZeRO-0, whose states are numbered as the module's parameters are ordered."""
    optimizer = model.values.get("optimizer")
    inner = optimizer.get("optimizer_state_dict", optimizer) if isinstance(optimizer, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
        return
    states, hyper = inner["state"], inner.get("param_groups")
    names = list(weights.trainable)
    numbered = {index: state for index, state in states.items() if type(index) is int and isinstance(state, dict)}
    if sorted(numbered) != list(range(len(names))) or any(
        isinstance(value, LazyTensor) and value.shape and value.shape != weights.trainable[names[index]].shape
        for index, state in numbered.items()
        for value in state.values()
    ):
        weights.warnings.append(
            f"{model.file.path}: the {len(states)} optimizer states are numbered, and cannot be told by name."
        )
        return
    weights.states = {names[index]: own(state) for index, state in sorted(numbered.items())}
    for group in hyper if isinstance(hyper, list) else ():
        if isinstance(group, dict) and isinstance(group.get("params"), list):
            numbers = [index for index in group["params"] if type(index) is int and 0 <= index < len(names)]
            weights.groups.append({**group, "params": [names[index] for index in numbers]})


def assemble(model: ModelFile, optims: Sequence[OptimFile], where: str, read_model: ReadModel) -> Weights:
    """ZeRO-1, 2 and 3: parameters and states from the partitions, the rest from the model files.

    Raises CorruptError where files contradict each other, UnsupportedError where the weights are elsewhere.
    """
    shapes = model.shapes if model.shapes is not None else optims[0].shapes
    if shapes is None:
        raise CorruptError(
            f"{model.file.path}: param_shapes is missing, so that nothing tells where a parameter begins."
        )
    groups = len(optims[0].masters)
    if len(shapes) != groups:
        raise CorruptError(
            f"{model.file.path} has the shapes of {len(shapes)} groups of parameters, and {optims[0].file.path} has "
            f"{groups} groups of partitions."
        )
    _check_offload(optims, shapes, where)
    weights = Weights(where, optims[0].stage, len(optims))
    sharded = weights.stage == 3
    cuts = [
        _cut_pieces(group, named, optims) if sharded else _cut_flat(group, named, optims, where)
        for group, named in enumerate(shapes)
    ]
    for group, copies in enumerate(cuts):
        for cut in copies:
            for name, tensor in cut.apply([optim.masters[group] for optim in optims]):
                if name in weights.trainable:
                    raise CorruptError(f"{model.file.path}: {name!r} occurs in two groups of parameters.")
                weights.trainable[name] = tensor
    _states(weights, cuts, optims)
    complete(weights, model, read_model)
    return weights


def complete(weights: Weights, model: ModelFile, read_model: ReadModel) -> None:
    """Add to the trained parameters what lies in the model files: frozen parameters, buffers and ties.

    Raises CorruptError for what is named there and cannot be found.
    """
    sharded = weights.stage == 3
    weights.frozen = _frozen_pieces(model, weights.world, read_model) if sharded else _frozen_whole(model)
    module = model.module or {}
    for name in model.buffers or () if model.module is not None else ():
        if name not in module:
            raise CorruptError(f"{model.file.path}: the buffer {name!r} is named, and is not in module.")
        weights.buffers[name] = module[name]
    weights.aliases = dict(model.shared)
    _note_extras(weights, model)
    known = {*weights.trainable, *weights.frozen, *weights.buffers, *weights.aliases}
    _rest(weights, model, {name: tensor for name, tensor in module.items() if name not in known}, sharded)
    _check_aliases(weights, model)


def _check_offload(optims: Sequence[OptimFile], shapes: Sequence[Mapping[str, Shape]], where: str) -> None:
    expected = any(math.prod(shape) for group in shapes for shape in group.values())
    if expected and all(master.numel == 0 for optim in optims for master in optim.masters):
        raise UnsupportedError(
            f"{where} holds no weights: its flat groups are empty, as when they were offloaded to NVMe, into files "
            "that "
            "only the training run can read.",
            "Save with stage3_gather_16bit_weights_on_model_save, or without offloading to NVMe.",
        )


def _note_extras(weights: Weights, model: ModelFile) -> None:
    if model.extras:
        shown = ", ".join(model.extras[:5]) + (", …" if len(model.extras) > 5 else "")
        weights.warnings.append(f"{model.file.path}: {len(model.extras)} entries of module are no tensors: {shown}.")


def _frozen_whole(model: ModelFile) -> dict[str, LazyTensor]:
    """ZeRO-2: frozen parameters lie whole in the model file."""
    frozen = {}
    for name, shape in (model.frozen or {}).items():
        tensor = model.fragments.get(name)
        if tensor is None or tensor.numel != math.prod(shape):
            found = "is missing" if tensor is None else f"has {tensor.numel} elements"
            raise CorruptError(
                f"{model.file.path}: the frozen parameter {name!r} {found}, where the shape {list(shape)} was expected."
            )
        frozen[name] = tensor if tensor.shape == shape else View(tensor, tensor.dtype, shape)
    return frozen


def _frozen_pieces(model: ModelFile, world: int, read_model: ReadModel) -> dict[str, LazyTensor]:
    """ZeRO-3: frozen parameters are cut like trainable ones, and lie in every rank's model file."""
    if not model.frozen:
        return {}
    models = [read_model(rank) for rank in range(world)]
    slices, _ = zero_layout.walk_pieces(model.frozen, world)
    frozen: dict[str, LazyTensor] = {}
    for piece in slices:
        fragments = []
        for each in models:
            fragment = each.fragments.get(piece.name)
            if fragment is None or fragment.numel != piece.piece or len(fragment.shape) != 1:
                found = "is missing" if fragment is None else f"has {fragment.numel} elements"
                raise CorruptError(
                    f"{each.file.path}: the part of the frozen parameter {piece.name!r} {found}, where {piece.piece} "
                    "elements were expected."
                )
            fragments.append(fragment)
        frozen.update(zero_layout.cut_pieces([piece._replace(offset=0)], fragments))
    return frozen


def _rest(weights: Weights, model: ModelFile, rest: Mapping[str, LazyTensor], sharded: bool) -> None:
    """What the module holds and nothing else names.

    ZeRO-1 lists no frozen parameters, and no release lists empty ones: both lie whole in the module. Releases before
    0.9.2 list no ties. Under ZeRO-3 the module holds placeholders: a name that is listed nowhere is lost.
    """
    module = model.module or {}
    seen = {same_bytes(module[name]): name for name in weights.trainable if name in module}
    for name, tensor in rest.items():
        if sharded and tensor.numel == 0 and len(tensor.shape) == 1:
            weights.unaccounted.append(name)
            continue
        owner = seen.get(same_bytes(tensor)) if tensor.numel else None
        if owner is not None:
            weights.aliases[name] = owner
        elif model.buffers is None and tensor.dtype.kind != "f":
            weights.buffers[name] = tensor
        elif tensor.numel == 0:
            weights.trainable[name] = tensor
        else:
            weights.frozen[name] = tensor


def _check_aliases(weights: Weights, model: ModelFile) -> None:
    named = {*weights.trainable, *weights.frozen, *weights.buffers}
    for alias, owner in list(weights.aliases.items()):
        if alias in named:
            del weights.aliases[alias]
        elif owner in weights.aliases and weights.aliases[owner] in named:
            weights.aliases[alias] = weights.aliases[owner]
        elif owner not in named:
            # The owner was left out when the checkpoint was saved, as a frozen parameter can be.
            if model.frozen is None and model.module is not None and owner not in model.module:
                del weights.aliases[alias]
                continue
            raise CorruptError(
                f"{model.file.path}: {alias!r} is tied to {owner!r}, which is nowhere in the checkpoint."
            )


# ------------------------------------------------------------------------------------------------ optimizer states


def own(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with tensors of its own: a step counter that several share must not become one tensor."""
    return {
        key: View(untagged(value), value.dtype, value.shape) if isinstance(value, LazyTensor) else value
        for key, value in state.items()
    }


def _states(weights: Weights, cuts: Sequence[Sequence[_Cut]], optims: Sequence[OptimFile]) -> None:
    """Every state cut as the weights are: what is as long as a partition is one, all else belongs to the group."""
    first = optims[0]
    for group, copies in enumerate(cuts):
        if group >= len(first.states) or not first.states[group]:
            continue
        partitioned = []
        common = {}
        for key, value in first.states[group].items():
            if isinstance(value, LazyTensor) and value.shape and value.numel >= first.masters[group].numel:
                partitioned.append(key)
            else:
                common[key] = value
        for cut in copies:
            for name in cut.names.values():
                weights.states[name] = own(common)
            for key in partitioned:
                parts = [_partition(optim, group, key, cut.pieces) for optim in optims]
                for name, tensor in cut.apply(parts):
                    weights.states[name][str(key)] = tensor
    weights.groups = list(_param_groups(cuts, first))


def _partition(optim: OptimFile, group: int, key: Any, exact: bool) -> LazyTensor:
    """One rank's part of a state, which may keep the padding that its master weights have lost."""
    value = optim.states[group].get(key) if group < len(optim.states) else None
    expected = optim.masters[group].numel
    if not isinstance(value, LazyTensor) or len(value.shape) != 1 or value.numel < expected:
        found = f"has the shape {list(value.shape)}" if isinstance(value, LazyTensor) else "is missing"
        raise CorruptError(
            f"{optim.file.path}: the optimizer state {key!r} of group {group} {found}, where {expected} elements were "
            "expected."
        )
    if exact and value.numel != expected:
        raise CorruptError(
            f"{optim.file.path}: the optimizer state {key!r} of group {group} has {value.numel} elements, and its "
            f"weights have {expected}."
        )
    return untagged(value)


def _param_groups(cuts: Sequence[Sequence[_Cut]], first: OptimFile) -> Iterable[dict[str, Any]]:
    """The optimizer's param_groups; each lists its partitions by number, and now the parameters in them by name."""
    names = [[name for cut in copies for name in cut.names.values()] for copies in cuts]
    if not first.hyper:
        yield from ({"params": group} for group in names)
        return
    for hyper in first.hyper:
        numbers = hyper.get("params")
        members = (
            [index for index in numbers if type(index) is int and 0 <= index < len(names)]
            if isinstance(numbers, list)
            else []
        )
        yield {**hyper, "params": [name for index in members for name in names[index]]}
