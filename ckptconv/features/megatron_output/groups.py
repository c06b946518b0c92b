"""The groups of parameters of Megatron-core's distributed optimizer. Pure.

Source: megatron/core/optimizer/{__init__,optimizer,distrib_optimizer}.py of Megatron-core 0.16 to 0.19. There, groups
have settings and one step, and are told apart by `wd_mult`, `lr_mult` and two flags, from 0.19 on by their rates too;
biases and other vectors have a `wd_mult` of 0. They hold no parameters. On several expert-parallel ranks, experts have
an optimizer of their own, and the groups of both are stored by its number.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.features.megatron_core.arguments import EXPERT_PARALLEL
from ckptconv.features.megatron_output.sharding import is_of_expert, is_stacked
from ckptconv.features.megatron_output.states import ADVICE, States
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor
from ckptconv.text import some

SHARDING = "fully_reshardable"
_STEP, _COMMON_STEP, _OF_EXPERTS = "step", "common_step", "is_expert_parallel"
# A setting that Transformer Engine's Adam looks for in each group, and that torch's does not have: it is always so.
_CORRECTED = {"bias_correction": True}
_INNER = {"optimizer", "param_groups"}
_SCALER, _SCALE = "grad_scaler", "scale"
# The values by which Megatron-core tells groups of one optimizer apart.
_IDENTIFIERS = ("wd_mult", "lr_mult", "is_decoupled_lr", "max_lr", "min_lr")


def has_two(weights: Mapping[str, LazyTensor], args: Any, optimizers: int | None) -> bool | None:
    """Whether experts have an optimizer of their own: as in the step that the output is like, with so many
    `optimizers`, or as the source's own arguments say; None if neither says it."""
    own = args.get(EXPERT_PARALLEL) if isinstance(args, Mapping) else None
    if not any(map(is_of_expert, weights)):
        return False
    return optimizers > 1 if optimizers else own > 1 if type(own) is int else None


def optimizer_of(
    states: States, weights: Mapping[str, LazyTensor], own: Mapping[Any, Any], are_two: bool, where: str
) -> dict[Any, Any]:
    """Return the values of one optimizer, or of a second one for experts, that all ranks share: with the groups of the
    source's `own`, if it is Megatron-core's.

    Raise UnsupportedError for settings that Megatron-core's groups cannot have: parameters of one kind with different
    ones, or different steps.
    """
    parts = optimizers_in(own)
    stored = [group for part in parts for group in part.groups]
    step = {} if stored and all(_STEP in group for group in stored) else {_STEP: _step_of(states, where)}
    optimizers: list[dict[str, Any]] = []
    for of_experts in (False, True) if are_two else (False,):
        names = [name for name in weights if not are_two or is_of_expert(name) == of_experts]
        if stored:
            groups = [group for group in stored if are_two and group.get(_OF_EXPERTS) == of_experts] or stored
        else:
            groups = _groups(states, {name: weights[name] for name in names}, where)
        groups = _distinct([{**_CORRECTED, **group, **step, _OF_EXPERTS: of_experts} for group in groups], where)
        scaling = {_SCALER: parts[0].scaling} if parts and parts[0].scaling else {}
        optimizers.append({**scaling, "optimizer": {"param_groups": groups}, "param_state_sharding_type": SHARDING})
    return dict(enumerate(optimizers)) if are_two else optimizers[0]


class Stored(NamedTuple):
    """An optimizer of Megatron-core, as its values say: the groups with their step, and the scaling of the loss."""

    groups: list[dict[str, Any]]
    scaling: dict[str, Any]


def optimizers_in(own: Mapping[Any, Any]) -> list[Stored]:
    """Return the optimizers in the values of Megatron-core: one, or several by number; none without groups."""
    parts = [own] if _INNER & own.keys() else [own[number] for number in sorted(own, key=str)]
    optimizers = [_stored(part) for part in parts]
    return [optimizer for optimizer in optimizers if optimizer] if all(optimizers) else []


def _stored(values: Any) -> Stored | None:
    """Return an optimizer; None if its values have no groups. One that is not distributed has one step among its
    states, and has the groups without a further level if all its parameters are fp32."""
    if not isinstance(values, Mapping):
        return None
    inner = values.get("optimizer", values)
    groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(groups, list) or not groups:
        return None
    if not all(isinstance(group, Mapping) for group in groups):
        return None
    shared = inner.get("state")
    step = {_STEP: shared[_COMMON_STEP]} if isinstance(shared, Mapping) and _COMMON_STEP in shared else {}
    groups = [{**step, **group} for group in groups]
    scaling = values.get(_SCALER)
    if not isinstance(scaling, Mapping) or not isinstance(scaling.get(_SCALE), float):
        return Stored(groups, {})
    return Stored(groups, {**scaling, _SCALE: Inline(struct.pack("<f", scaling[_SCALE]), DTYPES["float32"], (1,))})


def _step_of(states: States, where: str) -> int:
    steps = {value for state in states.by_parameter.values() if (value := _number(state.get(_STEP))) is not None}
    if len(steps) > 1:
        steps.discard(0)  # of parameters that got zeros
    if len(steps) != 1:
        raise UnsupportedError(f"{where}: the parameters have {len(steps)} numbers of steps, not one.", ADVICE)
    return steps.pop()


def _distinct(groups: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return `groups` without repetitions. Raise UnsupportedError if Megatron-core could not tell two apart."""
    distinct: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        if distinct.setdefault(tuple(group.get(key) for key in _IDENTIFIERS), group) != group:
            raise UnsupportedError(
                f"{where}: experts and other parameters have different settings, but with one optimizer, Megatron-core "
                "has one group for them.",
                ADVICE,
            )
    return [*distinct.values()]


def _groups(states: States, weights: Mapping[str, LazyTensor], where: str) -> list[dict[str, Any]]:
    """Return the groups of the parameters `weights`, made of those of another optimizer."""
    group_of = {name: group for group in states.groups for name in group["params"]}
    groups: list[dict[str, Any]] = []
    for factor in (1.0, 0.0):
        names = [name for name in group_of if name in weights and (is_vector(name, weights[name]) == (not factor))]
        every = [{key: value for key, value in group_of[name].items() if key != "params"} for name in names]
        if any(settings != every[0] for settings in every):
            raise UnsupportedError(
                f"{where}: {'vectors' if not factor else 'matrices'} have different settings in several groups, but "
                "Megatron-core has one group for them.",
                ADVICE,
            )
        identifiers = {"wd_mult": factor, "lr_mult": 1.0, "is_decoupled_lr": False}
        for settings in every[:1]:
            # From 0.19 on, a group is found by the rates of the training that loads it; before, the last one counts.
            rates = {"max_lr": settings.get("initial_lr", settings.get("lr")), "min_lr": 0.0}
            groups.extend([{**identifiers, **rates, **settings}, {**identifiers, **settings}])
    if not groups:
        raise UnsupportedError(f"{where}: no group of the optimizer has the settings of {some(weights)}.", ADVICE)
    return groups


def schedule_of(optimizer: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a schedule of learning rates that stays at that of the optimizer, for a training without one."""
    group = optimizers_in(optimizer)[0].groups[0]
    rate, decay = group.get("lr", 0.0), group.get("weight_decay", 0.0)
    return {
        "max_lr": rate, "min_lr": rate, "lr_warmup_steps": 0, "num_steps": 0, "lr_decay_style": "constant",
        "lr_decay_steps": 1, "start_wd": decay, "end_wd": decay, "wd_incr_style": "constant", "wd_incr_steps": 1,
    }  # fmt: skip


def is_vector(name: str, weight: LazyTensor) -> bool:
    """Whether Megatron-core lets no weight decay work on a parameter."""
    return name.endswith(".bias") or len(weight.shape) == 1 + is_stacked(name)


def _number(value: Any) -> int | None:
    """Return a step, which `taking` has read, as a number."""
    if isinstance(value, Inline):
        (value,) = struct.unpack("<f", value.data)
    return int(value) if isinstance(value, (int, float)) else None
