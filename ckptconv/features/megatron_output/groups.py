"""The groups of parameters of Megatron-core's distributed optimizer. Pure.

Source: megatron/core/optimizer/{__init__,optimizer,distrib_optimizer}.py of Megatron-core 0.16 to 0.19. There, groups
have settings and one step, and are told apart by `wd_mult`, `lr_mult` and two flags, from 0.19 on by their rates too;
biases and other vectors have a `wd_mult` of 0. They hold no parameters. On several expert-parallel ranks, experts have
an optimizer of their own, and the groups of both are stored by its number.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ckptconv.errors import UnsupportedError
from ckptconv.features.megatron_core.arguments import EXPERT_PARALLEL
from ckptconv.features.megatron_core.optimizers import SCALER, identifier, optimizers_in
from ckptconv.features.megatron_output.sharding import is_of_expert, is_stacked
from ckptconv.features.megatron_output.states import ADVICE, States
from ckptconv.tensors.lazy import Inline, LazyTensor
from ckptconv.text import some

SHARDING = "fully_reshardable"
_STEP, OF_EXPERTS = "step", "is_expert_parallel"
_MOST_STEPS = 1 << 53
# A setting that Transformer Engine's Adam looks for in each group, and that torch's does not have: it is always so.
_CORRECTED = {"bias_correction": True}
# The values by which Megatron-core tells groups of one optimizer apart.
_IDENTIFIERS = ("wd_mult", "lr_mult", "is_decoupled_lr", "max_lr", "min_lr")


def has_two(weights: Mapping[str, LazyTensor], args: Any, optimizers: int | None) -> bool | None:
    """Return whether experts have an optimizer of their own, as in the reference step with so many `optimizers`, or by
    the source's own arguments; None if neither shows it."""
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
            groups = [group for group in stored if are_two and group.get(OF_EXPERTS) == of_experts] or stored
        else:
            groups = _groups(states, {name: weights[name] for name in names}, where)
        _check_steps(groups, step, where)
        groups = _distinct([{**_CORRECTED, **group, **step, OF_EXPERTS: of_experts} for group in groups], where)
        scaling = {SCALER: parts[0].scaling} if parts and parts[0].scaling else {}
        optimizers.append({**scaling, "optimizer": {"param_groups": groups}, "param_state_sharding_type": SHARDING})
    return dict(enumerate(optimizers)) if are_two else optimizers[0]


def _step_of(states: States, where: str) -> int:
    steps = {value for state in states.by_parameter.values() if (value := _number(state.get(_STEP))) is not None}
    if len(steps) > 1:
        steps.discard(0)  # of parameters that got zeros
    if len(steps) != 1:
        raise UnsupportedError(
            f"{where}: the step counts of the parameters are {some(sorted(steps), form=repr) or 'missing'}; one number "
            "was expected.",
            ADVICE,
        )
    return steps.pop()


def _check_steps(groups: Sequence[Mapping[str, Any]], step: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedError if groups have several steps, or none that is a number."""
    steps = [{**group, **step}.get(_STEP) for group in groups]
    if any(_number(step) is None or step != steps[0] for step in steps):
        raise UnsupportedError(
            f"{where}: the groups of the optimizer have the step counts {some(steps, form=repr)}; one number was "
            "expected.",
            ADVICE,
        )


def _distinct(groups: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return `groups` without repetitions. Raise UnsupportedError if Megatron-core could not distinguish two of
    them."""
    distinct: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        if distinct.setdefault(tuple(identifier(group, key) for key in _IDENTIFIERS), group) != group:
            raise UnsupportedError(
                f"{where}: two groups, such as those of experts and of other parameters, have different settings, but "
                "Megatron-core cannot distinguish these groups in one optimizer.",
                ADVICE,
            )
    return [*distinct.values()]


def _groups(states: States, weights: Mapping[str, LazyTensor], where: str) -> list[dict[str, Any]]:
    """Return the groups of the parameters `weights`, from those of another optimizer."""
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
        raise UnsupportedError(f"{where}: no group of the optimizer has settings for {some(weights)}.", ADVICE)
    return groups


def is_vector(name: str, weight: LazyTensor) -> bool:
    """Return whether Megatron-core applies no weight decay to a parameter."""
    return name.endswith(".bias") or len(weight.shape) == 1 + is_stacked(name)


def _number(value: Any) -> int | None:
    """Return a step, which `taking` has read, as a number."""
    if isinstance(value, Inline):
        (value,) = struct.unpack("<f", value.data)
    return int(value) if isinstance(value, (int, float)) and 0 <= value < _MOST_STEPS and value == int(value) else None
