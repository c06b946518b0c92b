"""Writes DeepSpeed checkpoints of every layout, from parameters whose values are known. Needs torch alone.

`Model` is what is saved, `Save` how: stage, ranks, release, options. `expected` and `expected_states` are what a
conversion has to find, in the terms of the model: nothing here is taken from a converter. Padding is NaN, so that any
of it that comes through shows. Sources: DeepSpeed's engine.py and the state_dict() of its ZeRO optimizers, by release.
"""

from __future__ import annotations

import math
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from make_example import LossScaler, ZeroStageEnum, fragment_address, stand_ins

Tensors = dict[str, torch.Tensor]
TAG = "global_step3"
EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)")


# ---------------------------------------------------------------------------------------------------------- releases


@dataclass(frozen=True)
class Release:
    """How a release laid its files out. The defaults are those of the first that could be converted."""

    version: str = ""  # written since 0.4.2, with the configuration
    shapes_by_group: bool = False  # else one dict of all parameters
    shapes_in_model: bool = False  # else in the optimizer files
    buffer_names: bool = False
    frozen: bool = False
    shared: bool = False
    enum: bool = False  # else the stage is a plain int
    rigid: bool = False  # else every checkpoint is elastic
    paddings: bool = False  # group_paddings
    count_by_group: bool = False
    mappings: bool = False
    tuples: bool = False  # shapes are plain tuples in checkpoints with experts
    experts_listed: bool = False  # param_shapes and all else in the model files of models with experts
    mapped_for_all: bool = False  # mappings are those of partitions for all ranks, also where fewer share a group
    alignments: bool = False
    padding_by_rank: bool = False  # else all of it is noted on the last rank
    align: int = 1  # flat vectors are padded to so many times the ranks
    prefix: bool = False  # bf16_
    underscore: bool = True  # in mp_rank_00_optim_states.pt
    experts_by_layer: bool = False  # else one file holds an expert of every layer
    placeholder: int = 1  # elements that ZeRO-3 leaves in the place of a parameter


# What each release changed.
_CHANGES: dict[str, dict[str, Any]] = {
    "0.3.14": {"underscore": False},
    "0.3.16": {"underscore": True},
    "0.4.2": {"buffer_names": True, "version": "0.4.2"},
    "0.5.0": {"count_by_group": True},
    "0.5.4": {"align": 2, "shapes_by_group": True},
    "0.6.0": {"shapes_in_model": True, "placeholder": 0, "experts_by_layer": True, "rigid": True},
    "0.7.0": {"enum": True, "prefix": True},
    "0.8.0": {"paddings": True},
    "0.8.2": {"mappings": True, "mapped_for_all": True},
    "0.9.1": {"frozen": True},
    "0.9.2": {"shared": True},
    "0.13.0": {"tuples": True},
    "0.14.5": {"mapped_for_all": False},
    "0.19.3": {"experts_listed": True},
    "0.19.8": {"alignments": True, "padding_by_rank": True},
}
RELEASES: dict[str, Release] = {}
for _name, _change in _CHANGES.items():
    _before = list(RELEASES.values())[-1] if RELEASES else Release()
    RELEASES[_name] = replace(_before, **{"version": _before.version and _name, **_change})
NEWEST = RELEASES["0.19.8"]


# ------------------------------------------------------------------------------------------------- what is saved, how


@dataclass
class Model:
    """What is saved. `groups` are the master weights by optimizer group, with the names of the whole model (experts by
    global numbers); `ep` says over how many expert-parallel ranks a group's experts are spread, `fused` by prefix which
    experts of its w1, w2 and w3 each has; `tied` maps names to the names they share."""

    groups: list[Tensors]
    frozen: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    ep: dict[int, int] = field(default_factory=dict)
    fused: dict[str, list[list[int]]] = field(default_factory=dict)

    @property
    def trained(self) -> Tensors:
        return {name: tensor for group in self.groups for name, tensor in group.items()}


@dataclass(frozen=True)
class Save:
    """How it is saved. `stage` None is BF16_Optimizer; `align` is in elements; `sub_group` in elements of a rank."""

    stage: int | None = 2
    world: int = 2
    dtype: torch.dtype = torch.bfloat16
    release: Release = NEWEST
    align: int = 1
    sub_group: int = 10**9
    round_robin: bool = False
    elastic: bool = False
    exclude_frozen: bool = False
    data_before_experts: bool = False
    stream: bool = False  # instead of zip archives
    states: bool = True
    step: Any = 3
    zero: Mapping[str, Any] = field(default_factory=dict)  # more of the configuration
    client: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)  # more of the optimizer's file
    muon: frozenset[int] = frozenset()  # groups that Muon trains; with its states offloaded, cut like the weights
    ranks: tuple[int, int] = (1, 1)  # pipeline stages, tensor-parallel ranks

    @property
    def config(self) -> dict[str, Any]:
        zero = {
            "stage": 1 if self.stage is None else self.stage,
            "round_robin_gradients": self.round_robin,
            **self.zero,
        }
        return {
            "zero_optimization": zero,
            "bf16": {"enabled": self.dtype == torch.bfloat16},
            "optimizer": {"type": "Muon" if self.muon else "AdamW"},
            "use_data_before_expert_parallelism": self.data_before_experts,
        }


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor with random values, all different from those of another seed."""
    generator = torch.Generator().manual_seed(1000 * seed + math.prod(shape) + len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def states_of(tensor: torch.Tensor) -> Tensors:
    """Adam's moments, told by the master weights they belong to."""
    return {"exp_avg": tensor * 0.5 - 1, "exp_avg_sq": tensor.square() + 2}


def momentum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Muon's momentum, told by the master weights it belongs to."""
    return tensor * 0.25 + 1


def expected(model: Model, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """The weights that zero-to-fp32 has to find; `dtype` is the model's, in which frozen parameters are stored."""
    found = {name: tensor.clone() for name, tensor in model.trained.items()}
    found |= {name: tensor.to(dtype) for name, tensor in model.frozen.items()}
    found |= model.buffers
    found |= {alias: found[owner] for alias, owner in model.tied.items() if owner in found}
    return {n: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for n, t in found.items()}


def expected_states(model: Model, muon: Collection[int] = ()) -> Tensors:
    """The optimizer states that --optimizer has to find, without steps; of the groups `muon`, Muon's."""
    return {
        f"{name}.{key}": state
        for number, group in enumerate(model.groups)
        for name, tensor in group.items()
        for key, state in ({"momentum_buffer": momentum_of(tensor)} if number in muon else states_of(tensor)).items()
    }


def change_states(path: Path, key: str) -> None:
    """Add one to the states `key` of all parameters in a file of an optimizer."""
    with stand_ins():
        saved = torch.load(path, weights_only=False)
        for state in saved["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state[key] += 1
        torch.save(saved, path)


# --------------------------------------------------------------------------------------------------------- one rank set


def write(directory: Path, model: Model, save: Save) -> Path:
    """Write a checkpoint without model parallelism: its directory, with one tag."""
    write_rank(directory / TAG, model, save)
    (directory / "latest").write_text(TAG)
    return directory


def write_rank(tag: Path, model: Model, save: Save, mp: int = 0, *, pipeline: bool = False) -> None:
    """Write the files of one model-parallel rank; with `pipeline` the module is in layer files, written apart."""
    tag.mkdir(parents=True, exist_ok=True)
    if save.stage == 0:
        _save(_model_states(model, save, 0, [], pipeline), tag / f"mp_rank_{mp:02d}_model_states.pt", save)
    elif save.stage == 3:
        _write_pieces(tag, model, save, mp)
    else:
        _write_partitions(tag, model, save, mp, pipeline)
    _write_experts(tag, model, save, mp)


def write_layers(tag: Path, layers: Mapping[int, Tensors], dtype: torch.dtype, rank: int | None = None) -> None:
    """Write a pipeline's layer files: tensors by names relative to the layer, and what ZeRO made of the rest of it."""
    for layer, tensors in layers.items():
        model = "" if rank is None else f"-model_{rank:02d}"
        stored = {n: t.to(dtype) if t.dtype == torch.float32 else t for n, t in tensors.items()}
        _save(OrderedDict(stored), tag / f"layer_{layer:02d}{model}-model_states.pt")


def _save(tree: Any, path: Path, save: Save | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with stand_ins():
        torch.save(tree, path, _use_new_zipfile_serialization=not (save and save.stream))


def _optim_file(tag: Path, save: Save, dp: int, mp: int) -> Path:
    prefix = "bf16_" if save.release.prefix and save.dtype == torch.bfloat16 else ""
    underscore = "_" if save.release.underscore else ""
    return tag / f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}{underscore}optim_states.pt"


# ------------------------------------------------------------------------------------------------------- ZeRO-1 and 2


def _pad(size: int, unit: int) -> int:
    return -size % unit


def _reordered(names: Sequence[str], ranks: int) -> list[str]:
    return [name for rank in range(ranks) for name in names[rank::ranks]]


def _copies(model: Model, number: int) -> list[Tensors]:
    """A group as each of its expert-parallel ranks has it, with its own numbers for experts."""
    group, ep = model.groups[number], model.ep.get(number, 1)
    return [_of_rank(group, model, ep, rank) for rank in range(ep)]


def _of_rank(tensors: Tensors, model: Model, ep: int, ep_rank: int) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        placement = model.fused.get(name.rpartition(".")[0])
        if placement is not None:
            found[name] = tensor[placement[ep_rank]] if ep > 1 else tensor
        elif match is None or ep == 1:
            found[name] = tensor
        else:
            number, local = int(match[2]), _experts(model)[match[1]] // ep
            if number // local == ep_rank:
                found[f"{match[1]}{number % local}{match[3]}"] = tensor
    return found


def _experts(model: Model) -> dict[str, int]:
    """How many experts each layer has."""
    numbers: dict[str, set[int]] = {}
    for name in (*model.trained, *model.frozen, *model.buffers):
        if match := EXPERT.fullmatch(name):
            numbers.setdefault(match[1], set()).add(int(match[2]))
    return {layer: len(found) for layer, found in numbers.items()}


@dataclass
class _Flat:
    """A flat vector of parameters: which, in order; padding behind each; elements of a rank's partition."""

    params: Tensors
    alignments: list[int]
    share: int
    count: int

    def end(self) -> int:
        return sum(tensor.numel() for tensor in self.params.values()) + sum(self.alignments)

    def parts(self, of: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> list[torch.Tensor]:
        pieces = []
        for tensor, padding in zip(self.params.values(), self.alignments, strict=True):
            pieces += [of(tensor).reshape(-1), torch.full((padding,), math.nan, dtype=tensor.dtype)]
        dtype = next(iter(self.params.values())).dtype
        pieces.append(torch.full((self.share * self.count - self.end(),), math.nan, dtype=dtype))
        return list(torch.cat(pieces).split(self.share)) if self.share else [torch.cat(pieces)] * self.count

    def paddings(self, by_rank: bool) -> list[int]:
        total = self.share * self.count - self.end()
        if not by_rank:
            return [0] * (self.count - 1) + [total]
        return [min(max((rank + 1) * self.share - self.end(), 0), self.share) for rank in range(self.count)]

    def touched(self, rank: int) -> list[torch.Tensor]:
        """The parameters that a rank's partition has a part of."""
        found, at = [], -rank * self.share
        for tensor, padding in zip(self.params.values(), self.alignments, strict=True):
            if at < self.share and at + tensor.numel() > 0:
                found.append(tensor)
            at += tensor.numel() + padding
        return found

    def mapping(self, rank: int, share: int) -> Any:
        found, at = OrderedDict(), -rank * share
        for (name, tensor), padding in zip(self.params.items(), self.alignments, strict=True):
            low, high = max(at, 0), min(at + tensor.numel(), share)
            if low < high:
                found[name] = fragment_address(numel=high - low, start=low)
            at += tensor.numel() + padding
        return found


def _flat(params: Tensors, save: Save, count: int) -> _Flat:
    names = _reordered(list(params), count) if save.round_robin else list(params)
    alignments, at = [], 0
    for index, name in enumerate(names):
        at += params[name].numel()
        alignments.append(_pad(at, save.align) if index < len(names) - 1 else 0)
        at += alignments[-1]
    unit = save.release.align * count
    return _Flat({name: params[name] for name in names}, alignments, (at + _pad(at, unit)) // count, count)


def _lean(part: torch.Tensor, padding: int) -> torch.Tensor:
    return part[: part.numel() - padding]  # which of more padding than part leaves what it leaves


def _write_partitions(tag: Path, model: Model, save: Save, mp: int, pipeline: bool) -> None:
    release, bf16 = save.release, save.stage is None
    elastic = save.elastic or (not release.rigid and not bf16)
    flats = [
        [_flat(copy, save, save.world // len(copies)) for copy in copies]
        for copies in (_copies(model, number) for number in range(len(model.groups)))
    ]
    counts = [group[0].count for group in flats]
    shapes = [_shapes(group[0].params, save, model) for group in flats]
    for dp in range(save.world):
        masters, states, paddings, mappings = [], [], [], []
        for group in flats:
            ep_rank, rank = divmod(dp, group[0].count)
            if not save.data_before_experts:
                rank, ep_rank = divmod(dp, len(group))
            flat = group[ep_rank]
            padding = flat.paddings(release.padding_by_rank and not bf16)[rank]
            master = flat.parts()[rank]
            masters.append(master.clone() if bf16 else _lean(master, padding))
            state = _state(flat, rank, save, len(states) in save.muon)
            states.append({key: _lean(value, padding) for key, value in state.items()} if elastic else state)
            paddings.append(padding)
            shared = release.mapped_for_all and not bf16
            mappings.append(flat.mapping(rank, flat.share * flat.count // save.world if shared else flat.share))
        optimizer: dict[str, Any] = {"clip_grad": 1.0}
        if not bf16:
            assert save.stage
            optimizer |= {"loss_scaler": LossScaler(), "dynamic_loss_scale": False, "overflow": False}
            optimizer["zero_stage"] = ZeroStageEnum(save.stage) if release.enum else save.stage
        optimizer["base_optimizer_state"] = _base_state(states, save)
        if save.elastic:
            optimizer["base_optimizer_state_step"] = save.step
        elif elastic:
            optimizer["base_optimizer_state"] = [{"step": _step(save), **state} for state in states]
        optimizer["single_partition_of_fp32_groups"] = masters
        if release.paddings:
            optimizer["group_paddings"] = paddings
        optimizer["partition_count"] = counts if release.count_by_group or bf16 else save.world
        if release.alignments and not bf16:
            optimizer["param_alignment_paddings"] = [group[0].alignments for group in flats]
        if release.mappings:
            optimizer["param_slice_mappings"] = mappings
        _save(_optim_states({**optimizer, **save.optim}, shapes, save), _optim_file(tag, save, dp, mp), save)
    states_file = _model_states(model, save, 0, shapes, pipeline)
    _save(states_file, tag / f"mp_rank_{mp:02d}_model_states.pt", save)


def _state(flat: _Flat, rank: int, save: Save, muon: bool) -> Tensors:
    """What a rank's optimizer has of a group."""
    if muon and "offload_optimizer" not in save.zero:
        touched = [momentum_of(tensor).reshape(-1) for tensor in flat.touched(rank)]
        return {"momentum_buffer": torch.cat(touched)} if touched else {}
    states = (
        {"momentum_buffer": momentum_of}
        if muon
        else {key: lambda tensor, key=key: states_of(tensor)[key] for key in states_of(torch.zeros(1))}
    )
    return {key: flat.parts(of)[rank].clone() for key, of in states.items()}


def _base_state(states: Sequence[Tensors], save: Save) -> Any:
    if not save.states:
        return {"state": {}, "param_groups": [{"lr": 0.1, "params": [n]} for n in range(len(states))]}
    if save.elastic:
        return list(states)
    muon = [{"use_muon": number in save.muon} if save.muon else {} for number in range(len(states))]
    steps = [{} if number in save.muon else {"step": _step(save)} for number in range(len(states))]
    return {
        "state": {number: {**steps[number], **state} for number, state in enumerate(states) if steps[number] or state},
        "param_groups": [{"lr": 0.1 / (n + 1), **muon[n], "params": [n]} for n in range(len(states))],
    }


def _step(save: Save) -> Any:
    return save.step.clone() if isinstance(save.step, torch.Tensor) else save.step


# -------------------------------------------------------------------------------------------------------------- ZeRO-3


def _piece(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    size = -(-tensor.numel() // world)
    flat = torch.full((size * world,), math.nan, dtype=tensor.dtype)
    flat[: tensor.numel()] = tensor.reshape(-1)
    return flat[rank * size : (rank + 1) * size].clone()


def _sub_groups(group: Tensors, save: Save) -> Iterator[Tensors]:
    current: Tensors = {}
    for name, tensor in group.items():
        current[name] = tensor
        if sum(-(-t.numel() // save.world) for t in current.values()) >= save.sub_group:
            yield current
            current = {}
    if current:
        yield current


def _write_pieces(tag: Path, model: Model, save: Save, mp: int) -> None:
    by_group = [list(_sub_groups(group, save)) for group in model.groups]
    groups = [sub_group for group in by_group for sub_group in group]
    first = [sum(map(len, by_group[:number])) for number in range(len(by_group))]
    members = [list(range(start, start + len(group))) for start, group in zip(first, by_group, strict=True)]
    shapes = [_shapes(group, save, model) for group in groups]

    def flat(group: Tensors, rank: int, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.cat([_piece(of(tensor), rank, save.world) for tensor in group.values()])

    for dp in range(save.world):
        state: dict[int, Any] = {}
        for number, group in enumerate(groups if save.states else ()):
            moments = {
                key: flat(group, dp, lambda tensor, key=key: states_of(tensor)[key]) for key in states_of(torch.ones(1))
            }
            state[number] = {"step": _step(save), **moments}
        hyper = [{"lr": 0.1 / (number + 1), "params": own} for number, own in enumerate(members)]
        optimizer = {
            "zero_stage": ZeroStageEnum(3) if save.release.enum else 3,
            "loss_scaler": LossScaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": save.world,
            "optimizer_state_dict": {"state": state, "param_groups": hyper},
            "fp32_flat_groups": [flat(group, dp, lambda tensor: tensor) for group in groups],
        }
        _save(_optim_states({**optimizer, **save.optim}, shapes, save), _optim_file(tag, save, dp, mp), save)
        model_file = _model_states(model, save, dp, shapes, False)
        _save(model_file, tag / f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt", save)


# ------------------------------------------------------------------------------------------------------- model files


def _shapes(params: Tensors, save: Save, model: Model) -> Any:
    # Releases before 0.6.0 of ZeRO-3 and all others write what torch calls a shape; with experts, plain tuples.
    plain = save.release.tuples and bool(_experts(model))
    return OrderedDict((n, tuple(t.shape) if plain else t.shape) for n, t in params.items())


def _param_shapes(shapes: Sequence[Any], save: Save) -> Any:
    if save.release.shapes_by_group:
        return list(shapes)
    return OrderedDict((name, shape) for group in shapes for name, shape in group.items())


def _optim_states(optimizer: dict[str, Any], shapes: Sequence[Any], save: Save) -> dict[str, Any]:
    tree: dict[str, Any] = {"optimizer_state_dict": optimizer}
    if not save.release.shapes_in_model:
        tree["param_shapes"] = _param_shapes(shapes, save)
    if save.release.version:
        tree |= {"ds_config": save.config, "ds_version": save.release.version}
        optimizer["ds_version"] = save.release.version
    return tree


def _model_states(model: Model, save: Save, dp: int, shapes: Sequence[Any], pipeline: bool) -> dict[str, Any]:
    release = save.release
    if (_experts(model) or model.fused) and not release.experts_listed:
        counts = {"dp_world_size": save.world, "mp_world_size": math.prod(save.ranks)}
        return {"module": _module(model, save), "lr_scheduler": None, "num_experts": [4], **counts, **save.client}
    zero = save.stage != 0
    tree: dict[str, Any] = {"module": None if pipeline else _module(model, save)}
    if release.buffer_names:
        tree["buffer_names"] = list(_of_rank(model.buffers, model, max(model.ep.values(), default=1), 0))
    tree["optimizer"] = None if zero else _whole_optimizer(model, save)
    if release.shapes_in_model:
        tree["param_shapes"] = _param_shapes(shapes, save) if zero else None
    frozen = _of_rank(model.frozen, model, max(model.ep.values(), default=1), 0)
    # What no optimizer has: since 0.19.8 parameters without elements too.
    listed = release.frozen and save.stage in (2, 3) and not save.exclude_frozen
    if release.frozen:
        tree["frozen_param_shapes"] = OrderedDict((n, t.shape) for n, t in frozen.items()) if listed else None
        fragments = {
            name: _piece(tensor.to(save.dtype), dp, save.world) if save.stage == 3 else tensor.to(save.dtype)
            for name, tensor in frozen.items()
        }
        tree["frozen_param_fragments"] = OrderedDict(fragments) if listed else None
    if release.shared:
        tree["shared_params"] = (dict(model.tied) if dp == 0 else {}) if zero else None
    tree |= {"lr_scheduler": None, "global_steps": 3, "skipped_steps": 0}
    tree |= {"dp_world_size": save.world, "mp_world_size": math.prod(save.ranks)}
    if release.version:
        tree |= {"ds_config": save.config, "ds_version": release.version}
    if release.alignments:
        tree["checkpoint_parallel_dimensions"] = {"pp_degree": save.ranks[0], "tp_degree": save.ranks[1]}
    if model.fused:
        tree["ds_autoep_layers"] = [_fused_layer(prefix, ranks) for prefix, ranks in model.fused.items()]
    return {**tree, **save.client}


def _module(model: Model, save: Save) -> Any:
    """The module's state dict: without experts, which have files of their own."""
    state: dict[str, torch.Tensor] = OrderedDict()
    for group in model.groups:
        dense = {n: t for n, t in group.items() if not _is_expert(n, model)}
        if save.stage == 3:
            state.update((name, _placeholder(tensor, save)) for name, tensor in dense.items())
        elif dense:
            flat = torch.cat([tensor.reshape(-1) for tensor in dense.values()]).to(save.dtype)
            parts = flat.split([tensor.numel() for tensor in dense.values()])
            state.update((name, part.view(dense[name].shape)) for name, part in zip(dense, parts, strict=True))
    for name, tensor in model.frozen.items():
        if not save.exclude_frozen and not _is_expert(name, model):
            state[name] = _placeholder(tensor, save) if save.stage == 3 else tensor.to(save.dtype)
    for alias, owner in model.tied.items():
        if owner in state:
            state.setdefault(alias, state[owner])
    state.update((name, tensor) for name, tensor in model.buffers.items() if not _is_expert(name, model))
    return state


def _placeholder(tensor: torch.Tensor, save: Save) -> torch.Tensor:
    return torch.ones(save.release.placeholder, dtype=save.dtype)


def _whole_optimizer(model: Model, save: Save) -> dict[str, Any]:
    state = {number: {"step": _step(save), **states_of(tensor)} for number, tensor in enumerate(model.trained.values())}
    numbers = iter(range(len(state)))
    hyper = [{"lr": 0.1, "params": [next(numbers) for _ in group]} for group in model.groups]
    return {"state": state, "param_groups": hyper}


# ------------------------------------------------------------------------------------------------------------- experts


def _is_expert(name: str, model: Model) -> bool:
    return EXPERT.fullmatch(name) is not None or name.rpartition(".")[0] in model.fused


def _fused_layer(prefix: str, ranks: list[list[int]]) -> dict[str, Any]:
    return {
        "expert_key_prefix": prefix,
        "num_experts": sum(map(len, ranks)),
        "num_local_experts": len(ranks[0]),
        "ep_size": len(ranks),
        "expert_placement": {"ranks": [{"rank": rank, "experts": held} for rank, held in enumerate(ranks)]},
        "checkpoint_format": "per_expert_files",
    }


def _write_experts(tag: Path, model: Model, save: Save, mp: int) -> None:
    files: dict[str, dict[str, Any]] = {}
    layers: list[str] = []
    for name, tensor in (model.trained | model.frozen | model.buffers).items():
        stored = tensor if name in model.buffers else tensor.to(save.dtype)
        match = EXPERT.fullmatch(name)
        prefix = match[1] if match else name.rpartition(".")[0]
        if not match and prefix not in model.fused:
            continue
        if prefix not in layers:
            layers.append(prefix)
        layer = f"layer_{layers.index(prefix)}_" if save.release.experts_by_layer else ""
        parts = {int(match[2]): (name, stored)} if match else {n: (f"{name}.{n}", p) for n, p in enumerate(stored)}
        for number, (key, part) in parts.items():
            file = files.setdefault(f"{layer}expert_{number}_mp_rank_{mp:02d}_model_states.pt", {})
            file[key] = part.clone()
    for name, tree in files.items():
        _save(tree, tag / name)
    for ep_rank in range(max(model.ep.values(), default=0)):
        state = _whole_optimizer(model, save) if save.stage == 0 else None
        _save({"optimizer": state}, tag / f"expp_rank_{ep_rank}_mp_rank_{mp:02d}_optim_states.pt")
