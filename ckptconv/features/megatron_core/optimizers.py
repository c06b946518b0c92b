"""The optimizers in the values that all ranks of Megatron-core share. Pure.

Source: megatron/core/optimizer/{optimizer,distrib_optimizer,grad_scaler}.py of Megatron-core 0.5 to 0.19.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline

_STEP, _COMMON_STEP, _INNER = "step", "common_step", {"optimizer", "param_groups"}
SCALER, _SCALE = "grad_scaler", "scale"


class Stored(NamedTuple):
    """An optimizer of Megatron-core, as its values say: the groups with their step, and the scaling of the loss."""

    groups: list[dict[str, Any]]
    scaling: dict[str, Any]


def optimizers_in(own: Any) -> list[Stored]:
    """Return the optimizers in the values of Megatron-core: one, or several by number; none without groups."""
    if not isinstance(own, Mapping):
        return []
    parts = [own] if _INNER & own.keys() else [own[number] for number in sorted(own, key=str)]
    optimizers = [_stored(part) for part in parts]
    return [optimizer for optimizer in optimizers if optimizer] if all(optimizers) else []


def schedule_of(optimizer: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a schedule of learning rates that stays at that of the optimizer, for a training without one."""
    group = optimizers_in(optimizer)[0].groups[0]
    rate, decay = group.get("lr", 0.0), group.get("weight_decay", 0.0)
    return {
        "max_lr": rate, "min_lr": rate, "lr_warmup_steps": 0, "num_steps": 0, "lr_decay_style": "constant",
        "lr_decay_steps": 1, "start_wd": decay, "end_wd": decay, "wd_incr_style": "constant", "wd_incr_steps": 1,
    }  # fmt: skip


def identifier(group: Mapping[str, Any], key: str) -> Any:
    """Return a value that identifies a group. NeMo stores it under a longer key."""
    return group.get(key, group.get(f"pre_{key}"))


def _stored(values: Any) -> Stored | None:
    """Return an optimizer; None if its values have no groups. One that is not distributed has one step among its
    states, and has the groups without a further level if all its parameters are fp32."""
    if not isinstance(values, Mapping):
        return None
    inner = values.get("optimizer", values)
    inner = inner if isinstance(inner, Mapping) else {}
    groups = inner.get("param_groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(group, Mapping) for group in groups):
        return None
    shared = inner.get("state")
    step = {_STEP: shared[_COMMON_STEP]} if isinstance(shared, Mapping) and _COMMON_STEP in shared else {}
    groups = [{**step, **group} for group in groups]
    scaling = values.get(SCALER)
    if not isinstance(scaling, Mapping) or not isinstance(scaling.get(_SCALE), float):
        return Stored(groups, {})
    return Stored(groups, {**scaling, _SCALE: Inline(struct.pack("<f", scaling[_SCALE]), DTYPES["float32"], (1,))})
