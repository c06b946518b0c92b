"""Assembles parameters, frozen parameters, buffers and states from the records of one model-parallel rank's files.

Every element is accounted for. What a file names must be found. What is found must be named, or be padding of a known
size; anything else is an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.formats.deepspeed import partitions as zero_layout
from ckptconv.formats.deepspeed.partitions import Shape, Slice
from ckptconv.formats.deepspeed.records import ModelFile, OptimFile
from ckptconv.storage.paths import basename
from ckptconv.tensors.lazy import Concat, Inline, LazyTensor, View, same_bytes, untagged
from ckptconv.text import brief

# Names of the three weights of an expert where a layer of experts is fused.
FUSED = ("w1", "w2", "w3")
# Reads the model file of a data-parallel rank.
ReadModel = Callable[[int], ModelFile]
# Reads the layer files of a pipeline: their tensors by layer.
Layers = Callable[[], Mapping[int, Mapping[str, LazyTensor]]]


@dataclass
class Weights:
    """The tensors of one model-parallel rank, by kind.

    `states` are the optimizer states by parameter, `groups` the optimizer's param_groups with names for parameters.
    """

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
    # Pairs of tensors, by name, that are stored twice and must be equal: weights, and optimizer states.
    equal: list[tuple[str, LazyTensor, LazyTensor]] = field(default_factory=list)
    equal_states: list[tuple[str, LazyTensor, LazyTensor]] = field(default_factory=list)
    # Pairs of states that each rank keeps for itself, and that may differ.
    alike: list[tuple[str, LazyTensor, LazyTensor]] = field(default_factory=list)
    # Why the optimizer states cannot be determined, if so.
    states_error: CkptconvError | None = None

    def state_dict(self) -> dict[str, LazyTensor]:
        """Return all tensors by name, in the order in which DeepSpeed's own tool lists them."""
        weights = {**self.buffers, **self.frozen, **self.trainable}
        weights.update((alias, weights[owner]) for alias, owner in self.aliases.items())
        return weights

    def optimizer(self) -> dict[str, Any] | None:
        """Return the optimizer's state dict, with names for parameters; None if the checkpoint has none."""
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

    def names(self) -> list[str]:
        """Return every name but aliases."""
        return [*self.buffers, *self.frozen, *self.trainable]

    def without_frozen(self) -> None:
        """Remove the frozen parameters and their aliases."""
        self.aliases = {alias: owner for alias, owner in self.aliases.items() if owner not in self.frozen}
        self.frozen = {}


# ----------------------------------------------------------------------------------------------------- partitions


@dataclass(frozen=True)
class _Cut:
    """How to cut one copy of a group out of the partitions of `ranks`.

    `names` are the names of the result, by those in `slices`. `sizes` are the numbers of elements that a padded
    partition may have. The first of them is the distance between the starts of two ranks' partitions.
    """

    slices: list[Slice]
    ranks: list[int]
    names: Mapping[str, str]
    pieces: bool
    sizes: tuple[int, ...] = ()

    def whole(self, index: int) -> list[Slice]:
        """Return the parameters that overlap the partition of `ranks[index]`, at offsets in a vector of these alone."""
        return zero_layout.whole_in(self.slices, index * self.sizes[0], self.sizes[0])

    def apply(self, partitions: Sequence[LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the parameters in `partitions`, one for every data-parallel rank."""
        cut = zero_layout.cut_pieces if self.pieces else zero_layout.cut_flat
        for name, tensor in cut(self.slices, [partitions[rank] for rank in self.ranks]):
            yield self.names[name], tensor


@dataclass(frozen=True)
class _Group:
    """How to cut a group out of the partitions: once, or for experts once for every expert-parallel rank.

    `fused` gives, for each parameter that holds several experts, the experts on each of those ranks.
    """

    cuts: list[_Cut]
    fused: Mapping[str, list[list[int]]]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for cut in self.cuts for name in cut.names.values()))

    @property
    def pieces(self) -> bool:
        return self.cuts[0].pieces

    def apply(self, partitions: Sequence[LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the parameters in `partitions`, one for every data-parallel rank."""
        return self.join(cut.apply(partitions) for cut in self.cuts)

    def join(self, copies: Iterable[Iterable[tuple[str, LazyTensor]]]) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the parameters of all cuts, with each fused parameter joined into one."""
        joined: dict[str, list[LazyTensor]] = {}
        for copy in copies:
            for name, tensor in copy:
                if name in self.fused:
                    joined.setdefault(name, []).append(tensor)
                else:
                    yield name, tensor
        for name, parts in joined.items():
            yield name, zero_layout.join_experts(parts, self.fused[name])


def _cut_pieces(group: int, shapes: Mapping[str, Shape], optims: Sequence[OptimFile]) -> _Group:
    """Cut a sub-group of ZeRO-3, where every rank holds a piece of every parameter."""
    slices, end = zero_layout.walk_pieces(shapes, len(optims))
    for optim in optims:
        if optim.masters[group].numel != end:
            raise CorruptError(
                f"{optim.file.path}: flat group {group} has {optim.masters[group].numel} elements, and the shapes of "
                f"its {len(shapes)} parameters, cut for {len(optims)} ranks, give {brief(end)}."
            )
    return _Group([_Cut(slices, list(range(len(optims))), {name: name for name in shapes}, pieces=True)], {})


def _cut_flat(
    group: int, shapes: Mapping[str, Shape], optims: Sequence[OptimFile], where: str, experts: _Experts
) -> _Group:
    """Cut a group of ZeRO-1 or 2, where the ranks that share it hold consecutive parts of one flat vector."""
    first, world = optims[0], len(optims)
    alignments = first.alignments[group] if group < len(first.alignments) else []
    if alignments and len(alignments) != len(shapes):
        raise CorruptError(
            f"{first.file.path}: param_alignment_paddings has {len(alignments)} entries for group {group}, which has "
            f"{len(shapes)} parameters."
        )
    slices, end = zero_layout.walk_flat(shapes, alignments)
    count = first.count(group) or world
    if world % count:
        raise CorruptError(f"{first.file.path}: group {group} is shared by {count} ranks, which do not divide {world}.")
    fused = {name: experts.fused[name] for name in shapes if name in experts.fused}
    odd = [name for name in shapes if name not in fused and zero_layout.expert_of(name) is None]
    if odd and count < world:
        raise CorruptError(
            f"{first.file.path}: group {group} is shared by {count} of {world} ranks, as only experts are, and "
            f"{odd[0]!r} in it is none."
        )
    copies = zero_layout.ranks_of_group(world, count, experts.data_first)
    padded: list[tuple[int, ...]] = []
    for ranks in copies:
        held = sum(optims[rank].masters[group].numel for rank in ranks)
        needed = slices[-1].offset + math.prod(slices[-1].shape) if slices else 0
        # The flat vector is padded to a multiple of twice the ranks; most releases strip that. There is never more.
        if not needed <= held <= max(end, -(-end // (2 * count)) * 2 * count):
            raise CorruptError(
                f"{where}: group {group} has {held} elements on its {count} ranks ({basename(first.file.path)} and its "
                f"like), and its {len(shapes)} parameters with their padding take {brief(end)}."
            )
        padded.append(_check_ranks(group, slices, end, [optims[rank] for rank in ranks], world))
    if len(copies) == 1:
        return _Group([_Cut(slices, copies[0], {name: name for name in shapes}, False, padded[0])], {})
    for name, held_by in fused.items():
        if len(held_by) != len(copies) or any(len(held) != shapes[name][0] for held in held_by):
            sizes = ", ".join(str(len(held)) for held in held_by)
            raise UnsupportedError(
                f"{where}: the experts of {name!r} are spread unevenly ({sizes}) over {len(copies)} ranks.",
                "Convert it to a universal checkpoint with DeepSpeed's ds_to_universal.py first.",
            )
    return _Group(
        [
            _Cut(slices, ranks, zero_layout.global_names(shapes, ep_rank, experts.local), False, padded[ep_rank])
            for ep_rank, ranks in enumerate(copies)
        ],
        fused,
    )


@dataclass(frozen=True)
class _Experts:
    """Facts about experts.

    `local`: how many experts of a layer each expert-parallel rank holds. `fused`: by parameter and rank, the experts in
    it. `data_first`: whether neighbouring ranks share experts.
    """

    local: Mapping[str, int]
    fused: Mapping[str, list[list[int]]]
    data_first: bool


def _experts(model: ModelFile, optims: Sequence[OptimFile], shapes: Sequence[Mapping[str, Shape]]) -> _Experts:
    world = len(optims)
    # Several groups may hold a layer's experts, and some of them may be frozen.
    local = [name for group, named in enumerate(shapes) if optims[0].count(group) not in (0, world) for name in named]
    numbers = zero_layout.expert_numbers([*local, *(model.frozen or {})])
    return _Experts(
        {layer: max(found) + 1 for layer, found in numbers.items()},
        {f"{layer.prefix}.{name}": layer.experts for layer in model.fused for name in FUSED},
        _data_first(optims),
    )


def _check_ranks(
    group: int, slices: Sequence[Slice], end: int, optims: Sequence[OptimFile], world: int
) -> tuple[int, ...]:
    """Check what each rank states about its partition against the layout of `slices`, which ends at element `end`.

    Return the numbers of elements that a padded partition may have. `world` is the number of all ranks.
    """
    size = _partition_size(group, end, optims)
    for index, optim in enumerate(optims):
        held = optim.masters[group].numel
        padding = optim.paddings[group] if group < len(optim.paddings) else size - held
        # Releases that noted all padding on the last rank strip it by [: size - padding], where Python counts a
        # negative stop from the end.
        lean = size - padding if padding <= size else max(2 * size - padding, 0)
        if held not in (size, lean):
            raise CorruptError(
                f"{optim.file.path}: its partition of group {group} has {held} elements and a padding of "
                f"{brief(padding)}, and partitions of that group have {brief(size)}."
            )
        if held < size and any(other.masters[group].numel for other in optims[index + 1 :]):
            raise CorruptError(
                f"{optim.file.path}: its partition of group {group} has {held} of {brief(size)} elements, and only the "
                "last partitions may be shorter."
            )
        _check_fragments(group, slices, index, size, size * len(optims) // world, optim)
    if all(group < len(optim.paddings) for optim in optims):
        return (size,)
    # The file does not state the padding: up to the next multiple of the ranks, or of twice as many.
    return size, -(-end // len(optims)), -(-end // (2 * len(optims))) * 2


def _partition_size(group: int, end: int, optims: Sequence[OptimFile]) -> int:
    """Return the number of elements of each rank's partition of a group, with padding."""
    largest = max(optim.masters[group].numel for optim in optims)
    if any(group >= len(optim.paddings) for optim in optims):
        return largest  # releases before 0.8.0 do not state the padding
    padding = sum(optim.paddings[group] for optim in optims)
    size, rest = divmod(end + padding, len(optims))
    if rest or size < largest:
        raise CorruptError(
            f"{optims[0].file.path} and its like note {brief(padding)} elements of padding for group {group}, whose "
            f"parameters take {brief(end)}: that is not {len(optims)} partitions of {largest} elements."
        )
    return size


def _check_fragments(
    group: int, slices: Sequence[Slice], index: int, size: int, as_mapped: int, optim: OptimFile
) -> None:
    """Check the places in its partition that a rank states for parameters; it is partition `index`, of `size` elements.

    For experts, releases before 0.14.5 state places as if partitions had `as_mapped` elements.
    """
    zero = optim.config.get("zero_optimization")
    said = optim.fragments[group] if group < len(optim.fragments) else {}
    if not said or not isinstance(zero, dict) or zero.get("round_robin_gradients"):
        return  # with round robin, the file states places as they would be without it
    walked = _fragments_in(slices, index * size, size)
    if said in (walked, _fragments_in(slices, index * as_mapped, as_mapped)):
        return
    name = next(name for name in {**walked, **said} if said.get(name) != walked.get(name))
    texts = [
        f"at element {place[0]} with {place[1]} elements" if place else "nowhere"
        for place in (said.get(name), walked.get(name))
    ]
    raise CorruptError(
        f"{optim.file.path}: param_slice_mappings puts {name!r} of group {group} {texts[0]}, and the shapes put it "
        f"{texts[1]}."
    )


def _fragments_in(slices: Sequence[Slice], start: int, size: int) -> dict[str, tuple[int, int]]:
    """Return the place and number of the elements that each parameter has in `size` elements from `start`."""
    found = {}
    for name, shape, offset, _ in slices:
        low, high = max(offset - start, 0), min(offset - start + math.prod(shape), size)
        if low < high:
            found[name] = (low, high - low)
    return found


# ------------------------------------------------------------------------------------------------------- assembly


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
    _whole_states(weights, model)
    return weights


def is_whole(model: ModelFile) -> bool:
    """Whether ZeRO-0 wrote this model file, which then needs no optimizer files."""
    zero = model.config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    # Old releases do not state the stage. Under ZeRO, their model file has None for the optimizer.
    elsewhere = not model.config and "optimizer" in model.values and model.values["optimizer"] is None
    return model.shapes is None and stage == 0 and not elsewhere and "zero_pp_rank" not in basename(model.file.path)


def _whole_states(weights: Weights, model: ModelFile) -> None:
    """Read the optimizer of ZeRO-0, which numbers its states in the order of the module's parameters."""
    optimizer = model.values.get("optimizer")
    inner = optimizer.get("optimizer_state_dict", optimizer) if isinstance(optimizer, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
        return
    states, hyper = inner["state"], inner.get("param_groups")
    names = list(weights.trainable)
    numbered = {index: state for index, state in states.items() if type(index) is int and isinstance(state, dict)}
    # The numbers follow the groups. They have the order of the module only if there is a single group.
    single = isinstance(hyper, list) and len(hyper) == 1
    if not states:
        return
    if (
        not single
        or sorted(numbered) != list(range(len(names)))
        or any(
            isinstance(value, LazyTensor) and value.shape and value.shape != weights.trainable[names[index]].shape
            for index, state in numbered.items()
            for value in state.values()
        )
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
    shapes = _shapes(model, optims, saved, layers)
    _check_layout(model, optims, shapes, where)
    weights = Weights(where, optims[0].stage, len(optims))
    experts = _experts(model, optims, shapes)
    groups = [
        _cut_pieces(group, named, optims) if weights.stage == 3 else _cut_flat(group, named, optims, where, experts)
        for group, named in enumerate(shapes)
    ]
    for number, group in enumerate(groups):
        for name, tensor in group.apply([optim.masters[number] for optim in optims]):
            if name in weights.trainable:
                raise CorruptError(f"{model.file.path}: {name!r} occurs in two groups of parameters.")
            weights.trainable[name] = tensor
    _states(weights, groups, optims)
    complete(weights, model, read_model, saved)
    return weights


def _shapes(
    model: ModelFile, optims: Sequence[OptimFile], saved: Mapping[str, LazyTensor], layers: Layers
) -> list[dict[str, Shape]]:
    """Return the shapes of the parameters, by group."""
    first, groups = optims[0], len(optims[0].masters)
    shapes = model.shapes if model.shapes is not None else first.shapes
    if shapes is None:
        known = dict(saved) if model.module is None else {**saved, **model.module}
        if model.module is None:
            known.update(_in_layers(optims, layers()))
        shapes = [_mapped_shapes(group, model, optims, known) for group in range(groups)]
    if len(shapes) == groups:
        return shapes
    release = model.release() or first.release()
    if len(shapes) == 1 and groups > 1 and release < (0, 5, 4):
        # One list of all parameters. Since 0.5.0 it has the order of the groups, before that of the module.
        if release < (0, 5) and (first.stage != 3 or len(first.hyper) > 1):
            raise UnsupportedError(
                f"{first.file.path} has {groups} groups of partitions, and its release of DeepSpeed, older than 0.5.0, "
                "wrote nowhere which parameters are in which.",
                "Load the checkpoint with that release, and save the model's state dict.",
            )
        world, named = len(optims), list(shapes[0].items())
        sizes = [math.prod(shape) for _, shape in named]
        if first.stage == 3:
            sizes, held = [-(-size // world) for size in sizes], [(master.numel, 1) for master in first.masters]
        else:
            ranks = [_first_ranks(group, optims) for group in range(groups)]
            held = [
                (sum(optims[rank].masters[group].numel for rank in own), len(own)) for group, own in enumerate(ranks)
            ]
        ranges = zero_layout.split_list(sizes, held)
        if ranges is not None:
            return [dict(named[each.start : each.stop]) for each in ranges]
        elements = ", ".join(str(size) for size, _ in held[:8])
        raise CorruptError(
            f"{first.file.path} lists {len(named)} parameters of {brief(sum(sizes))} elements without their groups, "
            f"and which are in its groups of {elements} elements cannot be told."
        )
    raise CorruptError(
        f"{model.file.path} has the shapes of {len(shapes)} groups of parameters, and {first.file.path} has {groups} "
        "groups of partitions."
    )


def _first_ranks(group: int, optims: Sequence[OptimFile]) -> list[int]:
    """Return the data-parallel ranks that hold a group; for experts, those of the first expert-parallel rank."""
    count = optims[0].count(group) or len(optims)
    return zero_layout.ranks_of_group(len(optims), min(count, len(optims)), _data_first(optims))[0]


def _data_first(optims: Sequence[OptimFile]) -> bool:
    return optims[0].config.get("use_data_before_expert_parallelism") is True


def _in_layers(optims: Sequence[OptimFile], layers: Mapping[int, Mapping[str, LazyTensor]]) -> dict[str, LazyTensor]:
    """Return the tensors of layer files by the names that parameters have in the pipeline.

    No file says which layers share a tied module. They must have its parameters, in the right sizes, and must not be
    named in the partitions themselves. A parameter is left out if its shapes in such layers differ.
    """
    known = {f"{layer}.{inner}": tensor for layer, held in layers.items() for inner, tensor in held.items()}
    sizes = Counter[str]()
    for optim in optims:
        for group in optim.fragments:
            sizes.update({name: numel for name, (_, numel) in group.items()})
    tied: dict[str, dict[str, int]] = {}
    for name, numel in sizes.items():
        if name.startswith(zero_layout.TIED):
            module, _, inner = name[len(zero_layout.TIED) :].partition(".")
            tied.setdefault(module, {})[inner] = numel
    for module, inside in tied.items():
        fitting = [
            held
            for layer, held in layers.items()
            if all(inner in held and held[inner].numel == numel for inner, numel in inside.items())
            and not any(f"{layer}.{inner}" in sizes for inner in inside)
        ]
        for inner in inside:
            if len({held[inner].shape for held in fitting}) == 1:
                known[f"{zero_layout.TIED}{module}.{inner}"] = fitting[0][inner]
    return known


def _mapped_shapes(
    group: int, model: ModelFile, optims: Sequence[OptimFile], known: Mapping[str, LazyTensor]
) -> dict[str, Shape]:
    """Return the shapes of a group's parameters if no file lists them.

    That is so for models with experts from 0.6.0 to 0.19.2, and for pipelines without ZeRO. Since 0.8.2 each rank
    states which parts of which parameters its partition holds. The shapes come from `known`: all tensors of the module,
    the layer files and the expert files, by name. Experts of the first expert-parallel rank have their global numbers.
    """
    zero = optims[0].config.get("zero_optimization")
    reordered = isinstance(zero, dict) and zero.get("round_robin_gradients") is True
    sizes: dict[str, int] = {}
    for rank in _first_ranks(group, optims):
        held = optims[rank].fragments[group] if group < len(optims[rank].fragments) else {}
        for name, (_, numel) in sorted(held.items(), key=lambda item: item[1][0]):
            sizes[name] = sizes.get(name, 0) + numel
    sizes |= _unmapped_experts(group, sizes, optims, known)
    if not sizes or reordered:
        raise UnsupportedError(
            f"{model.file.path}: param_shapes is missing, and nothing else tells where a parameter begins.",
            "Releases of DeepSpeed from 0.6.0 to 0.8.1 saved models with experts so: load it with the release that "
            "saved it, and save the model's state dict.",
        )
    shapes = {}
    for name, size in sizes.items():
        tensor = known.get(name)
        if tensor is None or tensor.numel != size:
            found = "is nowhere" if tensor is None else f"has the shape {list(tensor.shape)}"
            raise CorruptError(
                f"{optims[0].file.path} and its like hold {size} elements of {name!r}, which {found} in the model, "
                "layer and expert files."
            )
        shapes[name] = tensor.shape
    return shapes


def _unmapped_experts(
    group: int, mapped: Mapping[str, int], optims: Sequence[OptimFile], known: Mapping[str, LazyTensor]
) -> dict[str, int]:
    """Return the numbers of elements of the parameters in a group of experts that is only partly mapped, in order.

    Releases before 0.14.5 map each partition as if all ranks shared the group, although fewer do. So they map only the
    beginning of what the group holds. The rest follows in the order of layers, experts, and tensors in the expert
    files. Return {} if the group does not fit that.
    """
    ranks, world = _first_ranks(group, optims), len(optims)
    held = sum(optims[rank].masters[group].numel for rank in ranks)
    if len(ranks) == world or not mapped or sum(mapped.values()) >= held:
        return {}
    experts = {name: expert for name in known if (expert := zero_layout.expert_of(name))}
    counts = {layer: len(found) for layer, found in zero_layout.expert_numbers(experts).items()}
    layers = {layer: number for number, layer in enumerate(counts)}
    # Names of experts of the first expert-parallel rank.
    local = [name for name, expert in experts.items() if expert.number * (world // len(ranks)) < counts[expert.layer]]
    local.sort(key=lambda name: (layers[experts[name].layer], experts[name].number))
    first = next(iter(mapped))
    found: dict[str, int] = {}
    for name in local[local.index(first) :] if first in local else ():
        held -= known[name].numel
        if held < 0:
            break
        found[name] = known[name].numel
    *complete_ones, last = mapped
    agrees = list(found)[: len(mapped)] == list(mapped) and all(mapped[name] == found[name] for name in complete_ones)
    return found if agrees and mapped[last] <= found[last] else {}


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
            raise CorruptError(f"{model.file.path}: the buffer {name!r} is named, and is not in module.")
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
            "Convert it to a universal checkpoint with DeepSpeed's ds_to_universal.py first.",
        )
    sharded = optims[0].stage == 3
    missing = [
        all(optim.masters[group].numel == 0 for optim in optims) and any(map(math.prod, named.values()))
        for group, named in enumerate(shapes)
    ]
    if missing and (all(missing) or (sharded and any(missing))):
        zero = optims[0].config.get("zero_optimization")
        offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
        device = offload.get("device") if isinstance(offload, dict) else None
        raise UnsupportedError(
            f"{where} does not hold the weights: {sum(missing)} of its {len(missing)} flat groups are empty, because "
            f"they were offloaded to {'NVMe' if device in (None, 'nvme') else device}, into files that only the "
            "training run can read.",
            "Load it in the training run, and save without offloading to NVMe or with "
            "stage3_gather_16bit_weights_on_model_save.",
        )


def _note_extras(weights: Weights, model: ModelFile) -> None:
    if model.extras:
        shown = ", ".join(model.extras[:5]) + (", …" if len(model.extras) > 5 else "")
        weights.warnings.append(f"{model.file.path}: {len(model.extras)} entries of module are no tensors: {shown}.")


def _frozen_whole(model: ModelFile) -> dict[str, LazyTensor]:
    """Return the frozen parameters of ZeRO-2, which lie whole in the model file."""
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
    """Return the frozen parameters of ZeRO-3, which are cut like trainable ones; each rank's model file has a piece."""
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
    """Whether ZeRO-3 left this in place of a parameter: an empty tensor, or in old releases one of a single element."""
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
                f"{weights.where}: {name!r} has the shape {list(weights.trainable[name].shape)} in the partitions, and "
                f"{list(tensor.shape)} in its expert file."
            )
    for name, held in parts.items():
        if held and name not in weights.trainable:
            shapes = {part.shape for part in held.values()}
            if sorted(held) != list(range(len(held))) or len(shapes) != 1:
                raise CorruptError(f"{weights.where}: the expert files hold the experts {sorted(held)} of {name!r}.")
            parameters[name] = Concat(tuple(View(held[n], held[n].dtype, (1, *held[n].shape)) for n in sorted(held)))
    for layer in model.fused:
        for name in (f"{layer.prefix}.{w}" for w in FUSED):
            whole = weights.trainable.get(name) or parameters.get(name)
            found = whole.shape[0] if whole is not None and whole.shape else 0
            if found != sum(map(len, layer.experts)):
                raise CorruptError(
                    f"{weights.where}: {name!r} holds {sum(map(len, layer.experts))} experts, and {found} are there.",
                    "Copy the expert files (layer_*_expert_*_model_states.pt) beside the others.",
                )
    _check_experts(weights, saved)


def _check_experts(weights: Weights, saved: Mapping[str, LazyTensor]) -> None:
    """Raise CorruptError if a layer lacks an expert, or an expert lacks a tensor that the others have."""
    held: dict[str, dict[str, set[int]]] = {}
    for expert in filter(None, map(zero_layout.expert_of, weights.names())):
        held.setdefault(expert.layer, {}).setdefault(expert.rest, set()).add(expert.number)
    in_files = zero_layout.expert_numbers(saved)
    for layer, parts in held.items():
        named = f"{weights.where}: of the experts {layer.rstrip('.')}"
        everything = set().union(*parts.values())
        lacking = [(rest, everything - numbers) for rest, numbers in parts.items() if numbers != everything]
        gaps = set(range(max(everything) + 1)) - everything
        if gaps:
            raise CorruptError(f"{named} {len(everything)} are there, and number {min(gaps)} is not.")
        if lacking:
            rest, numbers = lacking[0]
            raise CorruptError(
                f"{named} number {min(numbers)} has no {rest.lstrip('.')}, which others have.",
                "Frozen experts lie in the expert files (layer_*_expert_*_model_states.pt): copy them beside the "
                "others.",
            )
        if saved and in_files.get(layer, set()) != everything:
            odd = ", ".join(map(str, sorted(everything - in_files.get(layer, set()))[:8]))
            raise CorruptError(f"{named} the partitions hold {len(everything)}, and there is no expert file for {odd}.")


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
                    weights.warnings.append(
                        f"{model.file.path}: {alias!r} is tied to {owner!r}, which was left out when this was saved."
                    )
                continue
            raise CorruptError(
                f"{model.file.path}: {alias!r} is tied to {owner!r}, which is nowhere in the checkpoint."
            )


# ------------------------------------------------------------------------------------------------ optimizer states


def own(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with tensors of its own: a step counter that several share must not tie them."""
    return {
        key: View(untagged(value), value.dtype, value.shape) if isinstance(value, LazyTensor) else value
        for key, value in state.items()
    }


def _states(weights: Weights, groups: Sequence[_Group], optims: Sequence[OptimFile]) -> None:
    """Cut every state as the weights are cut.

    Only a tensor as long as a partition is cut; a single value belongs to each parameter of the group. Muon's states
    are those of whole parameters, unless they are offloaded.
    """
    first = optims[0]
    for number, group in enumerate(groups):
        if number >= len(first.states) or not first.states[number]:
            continue
        partitioned, common, odd = [], {}, []
        for key, value in first.states[number].items():
            if not isinstance(value, LazyTensor) or not value.shape:
                common[key] = value
            elif value.numel >= first.masters[number].numel:
                partitioned.append(key)
            elif value.numel == 1:
                common[key] = value
            elif first.uses_muon(number) and not group.pieces:
                partitioned.append(key)  # shorter than the partition: whole parameters have no padding between them
            else:
                odd.append(str(key))
        for name in group.names:
            weights.states[name] = own(common)
        for key in partitioned:
            try:
                for name, tensor in _state(weights, number, key, group, optims):
                    weights.states[name][str(key)] = tensor
            except (CorruptError, UnsupportedError) as error:
                if not first.uses_muon(number):
                    raise
                # Errors in Muon's saved states do not affect the weights.
                weights.states_error = error
        if odd:
            weights.warnings.append(
                f"{first.file.path}: the optimizer's {', '.join(odd)} of group {number} belong to no single parameter, "
                "and are left out of the optimizer states."
            )
    weights.groups = list(_param_groups(groups, first))


def _state(
    weights: Weights, number: int, key: Any, group: _Group, optims: Sequence[OptimFile]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the state `key` of each parameter of a group."""
    held = [optim.states[number].get(key) if number < len(optim.states) else None for optim in optims]
    if _is_whole(number, key, group, optims, held):
        yield from group.join(_whole_parameters(weights, number, key, cut, optims, held) for cut in group.cuts)
        return
    sizes = {rank: cut.sizes for cut in group.cuts for rank in cut.ranks}
    parts = [_partition(optim, number, key, held[rank], sizes[rank]) for rank, optim in enumerate(optims)]
    yield from group.apply(parts)


def _is_whole(number: int, key: Any, group: _Group, optims: Sequence[OptimFile], held: Sequence[Any]) -> bool:
    """Whether a state is that of the whole parameters which overlap a rank's partition, and not of the partition.

    Muon's states are, but not all releases say so. Raises UnsupportedError if it may be either, CorruptError if it can
    be neither.
    """
    first = optims[0]
    if group.pieces:
        return False
    if first.whole is not None:
        return key in first.whole[number]
    if not first.uses_muon(number):
        return False
    not_cut = not_whole = ""
    for cut in group.cuts:
        for index, rank in enumerate(cut.ranks):
            value, masters = held[rank], optims[rank].masters[number].numel
            size = value.numel if isinstance(value, LazyTensor) else 0
            whole = sum(math.prod(piece.shape) for piece in cut.whole(index))
            told = f"{optims[rank].file.path} has {size} elements of it"
            if size not in (masters, *cut.sizes):
                not_cut = f"{told}, and {masters} of the weights"
            if size != whole:
                not_whole = f"{told}, and its parameters take {whole}"
    if not_cut and not_whole:
        raise CorruptError(
            f"Muon's state {key!r} of group {number} is neither cut as the weights are ({not_cut}), nor of whole "
            f"parameters ({not_whole}). Elastic checkpoints lose the end of it.",
            "Convert the weights alone, without the optimizer states.",
        )
    if not_cut or not_whole:
        return bool(not_cut)
    # If both lengths fit, no parameter is on two ranks, and both readings agree unless padding separates parameters.
    if number < len(first.alignments) and any(first.alignments[number]):
        raise UnsupportedError(
            f"{first.file.path}: Muon's state {key!r} of group {number} may be of whole parameters or of the rank's "
            "partition, which are of the same length, and nothing says of which.",
            "Convert the weights alone, without the optimizer states.",
        )
    return False


def _whole_parameters(
    weights: Weights, number: int, key: Any, cut: _Cut, optims: Sequence[OptimFile], held: Sequence[Any]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the states of the parameters of one copy of a group, where ranks have states of whole parameters.

    Each rank that has a part of a parameter has the whole state of it: these must be equal.
    """
    found: dict[str, LazyTensor] = {}
    for index, rank in enumerate(cut.ranks):
        slices = cut.whole(index)
        needed = sum(math.prod(piece.shape) for piece in slices)
        if not slices:
            continue
        value = _partition(optims[rank], number, key, held[rank], (), needed)
        for name, tensor in zero_layout.cut_flat(slices, [value]):
            if name in found:
                weights.equal_states.append((f"{cut.names[name]}.{key}", found[name], tensor))
            else:
                found[name] = tensor
    for piece in cut.slices:
        if piece.name in found:
            yield cut.names[piece.name], found[piece.name]


def _partition(
    optim: OptimFile, group: int, key: Any, value: Any, padded: Sequence[int], needed: int | None = None
) -> LazyTensor:
    """Return one rank's part of a state.

    It must have as many elements as the rank's master weights, or one of the sizes `padded` that these had before their
    padding was stripped; or, if given, `needed` elements. Raises CorruptError otherwise.
    """
    expected = optim.masters[group].numel if needed is None else needed
    if value is None and not expected:
        return Inline(b"", optim.masters[group].dtype, (0,))
    if (
        not isinstance(value, LazyTensor)
        or len(value.shape) != 1
        or (value.numel != expected and not (value.numel > expected and value.numel in padded))
    ):
        found = f"has the shape {list(value.shape)}" if isinstance(value, LazyTensor) else "is missing"
        raise CorruptError(
            f"{optim.file.path}: the optimizer state {key!r} of group {group} {found}, where {expected} elements were "
            "expected."
        )
    return untagged(value)


def _param_groups(groups: Sequence[_Group], first: OptimFile) -> Iterable[dict[str, Any]]:
    """Yield the optimizer's param_groups, which list their partitions by number, with names of parameters instead."""
    names = [group.names for group in groups]
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
