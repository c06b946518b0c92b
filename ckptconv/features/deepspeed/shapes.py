"""The shapes of the parameters of each group, from the file that lists them, or from the records of the ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.deepspeed import partitions as zero_layout
from ckptconv.features.deepspeed.partitions import Shape
from ckptconv.features.deepspeed.records import ModelFile, OptimFile
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import brief

# Reads the layer files of a pipeline: their tensors by layer.
Layers = Callable[[], Mapping[int, Mapping[str, LazyTensor]]]


def find_shapes(
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
                f"{first.file.path} has {groups} groups of partitions, but its DeepSpeed release, older than 0.5.0, "
                "did not record the parameters of each group.",
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
            return [dict(named[positions.start : positions.stop]) for positions in ranges]
        elements = ", ".join(str(size) for size, _ in held[:8])
        raise CorruptError(
            f"{first.file.path} lists {len(named)} parameters with {brief(sum(sizes))} elements in all, but not the "
            f"parameters of each group, and the parameters cannot be matched to groups of {elements} elements."
        )
    raise CorruptError(
        f"{model.file.path} has the shapes of {len(shapes)} groups of parameters, but {first.file.path} has {groups} "
        "groups of partitions."
    )


def _first_ranks(group: int, optims: Sequence[OptimFile]) -> list[int]:
    """Return the data-parallel ranks that hold a group; for experts, those of the first expert-parallel rank."""
    count = optims[0].count(group) or len(optims)
    return zero_layout.ranks_of_group(len(optims), min(count, len(optims)), optims[0].data_first)[0]


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
    sizes: dict[str, int] = {}
    for rank in _first_ranks(group, optims):
        held = optims[rank].fragments[group] if group < len(optims[rank].fragments) else {}
        for name, (_, numel) in sorted(held.items(), key=lambda item: item[1][0]):
            sizes[name] = sizes.get(name, 0) + numel
    sizes |= _unmapped_experts(group, sizes, optims, known)
    if not sizes or optims[0].round_robin:
        raise UnsupportedError(
            f"{model.file.path}: param_shapes is missing, so the offsets of the parameters are not known.",
            "DeepSpeed 0.6.0 to 0.8.1 did not save it for models with experts: load the checkpoint with the release "
            "that saved it, and save the model's state dict.",
        )
    shapes = {}
    for name, size in sizes.items():
        tensor = known.get(name)
        if tensor is None or tensor.numel != size:
            actual = "is missing" if tensor is None else f"has the shape {list(tensor.shape)}"
            raise CorruptError(
                f"{optims[0].file.path} and the files of the other ranks contain {size} elements of "
                f"{name!r}, which {actual} in the model, layer and expert files."
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
    counts = {layer: len(unmapped) for layer, unmapped in zero_layout.expert_numbers(experts).items()}
    layers = {layer: number for number, layer in enumerate(counts)}
    # Names of experts of the first expert-parallel rank.
    local = [name for name, expert in experts.items() if expert.number * (world // len(ranks)) < counts[expert.layer]]
    local.sort(key=lambda name: (layers[experts[name].layer], experts[name].number))
    first = next(iter(mapped))
    unmapped: dict[str, int] = {}
    for name in local[local.index(first) :] if first in local else ():
        held -= known[name].numel
        if held < 0:
            break
        unmapped[name] = known[name].numel
    *complete_ones, last = mapped
    same_order = list(unmapped)[: len(mapped)] == list(mapped)
    agrees = same_order and all(mapped[name] == unmapped[name] for name in complete_ones)
    return unmapped if agrees and mapped[last] <= unmapped[last] else {}
