"""The states of Megatron-core's distributed optimizer in their `fully_reshardable` form. Pure.

Source: megatron/core/optimizer/{__init__,optimizer,distrib_optimizer}.py of Megatron-core 0.16 to 0.19. There, each
state of a parameter is stored like the parameter, as optimizer.state.<state>.<parameter>, with `param` for the fp32
master. Groups have settings and one step, and are told apart by `wd_mult`, `lr_mult` and two flags; biases and other
vectors have a `wd_mult` of 0. They hold no parameters.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.features.dcp.contents import DEFAULT_OPTIMIZER_KEY, DcpContents
from ckptconv.features.megatron_output.sharding import Sharded, is_stacked, sharded
from ckptconv.tensors import casting
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor
from ckptconv.text import some

_MOMENTS, _MASTER, _STEP = ("exp_avg", "exp_avg_sq"), "param", "step"
_MASTERS = (_MASTER, "fp32_param", "master_param")
SHARDING = "fully_reshardable"
# A buffer, which is not trained.
_BUFFERS = (".expert_bias",)
_ADVICE = "Leave out --states to write the weights alone."


class States(NamedTuple):
    """States by parameter, and groups of parameters with their settings, as torch's optimizers have them."""

    by_parameter: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]


def taken_out(content: DcpContents) -> States:
    """Take the optimizer's states out of `content`, and return them."""
    states = States({}, [])
    groups: dict[int, dict[str, Any]] = {}
    for leaves in (content.tensors, content.values):
        for key in [key for key, leaf in leaves.items() if leaf.path[:1] == (DEFAULT_OPTIMIZER_KEY,)]:
            path, value = leaves.pop(key)
            if path[1] == "state":
                states.by_parameter.setdefault(str(path[2]), {})[str(path[3])] = value
            elif len(path) == 4:
                groups.setdefault(int(path[2]), {})[str(path[3])] = value
    states.groups.extend(groups[number] for number in sorted(groups))
    return states


def stored_states(states: States, weights: Mapping[str, LazyTensor], to: str, where: str) -> dict[str, Sharded]:
    """Return the states by their keys in the checkpoint, each like the parameters that `weights` are.

    Raise UnsupportedError for another optimizer than Adam, and for parameters without states.
    """
    trained = {name: tensor for name, tensor in weights.items() if not name.endswith(_BUFFERS)}
    lacking = [name for name in trained if not set(_MOMENTS) <= states.by_parameter.get(name, {}).keys()]
    if lacking:
        raise UnsupportedError(
            f"{where}: {some(lacking)} have no {' and '.join(_MOMENTS)}, which Megatron-core's optimizer has of every "
            "parameter.",
            f"--fill-states writes zeros if others have them. {_ADVICE}",
        )
    if any(".experts." in name for name in trained):
        raise UnsupportedError(
            f"{where}: the states of experts cannot be written: with expert parallelism, Megatron-core has another "
            "optimizer for them.",
            _ADVICE,
        )
    kinds: dict[str, dict[str, LazyTensor]] = {key: {} for key in (*_MOMENTS, _MASTER)}
    for name, weight in trained.items():
        state = states.by_parameter[name]
        for key in _MOMENTS:
            kinds[key][name] = _widened(state[key])
        kinds[_MASTER][name] = _widened(next((state[key] for key in _MASTERS if key in state), weight))
    return {f"optimizer.state.{key}": sharded(tensors, to, where) for key, tensors in kinds.items()}


def _widened(tensor: LazyTensor) -> LazyTensor:
    return tensor if tensor.dtype.name == "float32" else casting.cast(tensor, DTYPES["float32"])


def optimizer_of(
    states: States, weights: Mapping[str, LazyTensor], own: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return the optimizer's values that all ranks share: the source's `own`, if it is Megatron-core's.

    Raise UnsupportedError for settings that Megatron-core's groups cannot have: parameters of one kind with different
    ones, or different steps.
    """
    inner = own.get("optimizer")
    if isinstance(inner, Mapping) and inner.get("param_groups"):
        return {**own, "param_state_sharding_type": SHARDING}
    steps = {value for state in states.by_parameter.values() if (value := _number(state.get(_STEP))) is not None}
    if len(steps) > 1:
        steps.discard(0)  # of parameters that got zeros
    if len(steps) != 1:
        raise UnsupportedError(f"{where}: the parameters have {len(steps)} numbers of steps, not one.", _ADVICE)
    (step,) = steps
    group_of = {name: group for group in states.groups for name in group["params"]}
    groups: list[dict[str, Any]] = []
    for factor in (1.0, 0.0):
        names = [name for name in group_of if name in weights and (_is_vector(name, weights[name]) == (not factor))]
        every = [{key: value for key, value in group_of[name].items() if key != "params"} for name in names]
        if any(settings != every[0] for settings in every):
            raise UnsupportedError(
                f"{where}: {'vectors' if not factor else 'matrices'} have different settings in several groups, but "
                "Megatron-core has one group for them.",
                _ADVICE,
            )
        told = {"wd_mult": factor, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, _STEP: step}
        for settings in every[:1]:
            # From 0.19 on, a group is found by the rates of the training that loads it; before, the last one counts.
            rates = {"max_lr": settings.get("initial_lr", settings.get("lr")), "min_lr": 0.0}
            groups.extend([{**settings, **told, **rates}, {**settings, **told}])
    return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": SHARDING}


def schedule_of(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schedule of learning rates that stays at that of the optimizer, for a training without one."""
    group = optimizer["optimizer"]["param_groups"][0]
    rate, decay = group.get("lr", 0.0), group.get("weight_decay", 0.0)
    return {
        "max_lr": rate, "min_lr": rate, "lr_warmup_steps": 0, "num_steps": 0, "lr_decay_style": "constant",
        "lr_decay_steps": 1, "start_wd": decay, "end_wd": decay, "wd_incr_style": "constant", "wd_incr_steps": 1,
    }  # fmt: skip


def _is_vector(name: str, weight: LazyTensor) -> bool:
    """Whether Megatron-core lets no weight decay work on a parameter."""
    return name.endswith(".bias") or len(weight.shape) == 1 + is_stacked(name)


def _number(value: Any) -> int | None:
    """Return a step, which `taking` has read, as a number."""
    if isinstance(value, Inline):
        (value,) = struct.unpack("<f", value.data)
    return int(value) if isinstance(value, (int, float)) else None
