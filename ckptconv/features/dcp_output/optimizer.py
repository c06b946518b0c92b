"""Arrange an optimizer's states as torch's `get_optimizer_state_dict` does. Pure.

Source: torch/distributed/checkpoint/state_dict.py; torch/optim/*.py for the names of states, adam.py for the settings
of a group.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

from ckptconv.errors import UnsupportedError
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor, Zeros
from ckptconv.text import brief

# The settings of torch's Adam and AdamW that other implementations do not have. `dcp.load` asks for each of them.
ADAM = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
# Settings of torch's Muon, for groups of Muon with Adam in one optimizer, which have no others.
_MUON = {
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-07,
    "ns_steps": 5,
    "adjust_lr_fn": None,
}
_OF_ADAM = frozenset({"exp_avg", "exp_avg_sq"})
# The states of torch's optimizers: with these, each keeps its step as a tensor. Others may ask for a number.
_OF_TORCH = frozenset(
    {
        "acc_delta", "ax", "col_var", "eta", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq",
        "momentum_buffer", "mu", "mu_product", "prev", "row_var", "square_avg", "step", "step_size", "sum", "variance",
    }
)  # fmt: skip
_STEP, _PARAMS, _MOMENTUM = "step", "params", "momentum_buffer"
# The states that are zero before the first step, in torch's optimizers and those that are like them.
_FROM_ZERO = frozenset(
    {_STEP, _MOMENTUM, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "grad_avg"}
)
_UNFILLED = "Leave --fill-states out, and load with DefaultLoadPlanner(allow_partial_load=True)."


def arranged(tree: Mapping[str, Any], *, flat: bool = False) -> dict[str, Any]:
    """Return {"state": {parameter: {key: value}}, "param_groups": [group]} as torch's optimizers have it.

    A step that is a number becomes a tensor, as torch keeps it, unless the parameter has states that torch's optimizers
    do not have: these are of another optimizer, which loads them as it saved them. Groups of Adam and Muon get the
    settings that torch's have and others lack, at torch's defaults. With `flat`, the result is one dict with a key for
    each state and each setting of a parameter, as that of `flatten_optimizer_state_dict`: state.<parameter>.exp_avg,
    param_groups.<parameter>.lr.
    """
    states = {str(name): _with_step(state) for name, state in tree["state"].items()}
    is_adam = any(state.keys() >= _OF_ADAM for state in states.values() if isinstance(state, Mapping))
    groups = [_completed(group, is_adam) for group in tree.get("param_groups", ())]
    if not flat:
        return {"state": states, "param_groups": groups}
    flattened = {f"state.{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    for group in groups:
        settings = [(key, value) for key, value in group.items() if key != _PARAMS]
        flattened.update((f"param_groups.{name}.{key}", value) for name in group[_PARAMS] for key, value in settings)
    return flattened


def unused(tree: Mapping[str, Any]) -> list[str]:
    """Return the parameters of the groups that have no states: they have had no gradient yet. Those of SGD without
    momentum never have any."""
    groups = (group for group in tree.get("param_groups", ()) if "dampening" not in group or group.get("momentum"))
    names = (name for group in groups for name in group.get(_PARAMS, ()))
    return [name for name in dict.fromkeys(names) if not tree["state"].get(name)]


def filled(
    tree: Mapping[str, Any], lacking: Iterable[str], weights: Mapping[str, LazyTensor], where: str
) -> dict[str, Any]:
    """Return `tree` with states for the parameters `lacking` them, as they are before the first step.

    They have the states that others of their group have, or those of all groups. Raise UnsupportedError, which names
    the checkpoint `where`, if these differ, or begin with something else than zeros.
    """
    states = dict(tree["state"])
    lacking = frozenset(lacking)
    for group in tree.get("param_groups", ()):
        names = [name for name in group[_PARAMS] if name in lacking]
        known = [tree["state"][name] for name in group[_PARAMS] if name not in lacking] or list(tree["state"].values())
        for name in names:
            if name not in weights:
                raise UnsupportedError(
                    f"{where}: {brief(name)} has no optimizer states, and they cannot be created: the parameter is "
                    "not among the weights, so its shape is not known.",
                    _UNFILLED,
                )
            if len({frozenset(state) for state in known}) != 1:
                raise UnsupportedError(
                    f"{where}: {brief(name)} has no optimizer states, and they cannot be created: "
                    f"{'the other parameters have different kinds of states' if known else 'no parameter has states'}.",
                    _UNFILLED,
                )
            states[name] = {key: _first(key, value, weights[name], group, where) for key, value in known[0].items()}
    return {**tree, "state": states}


def _first(key: str, present: Any, weight: LazyTensor, group: Mapping[str, Any], where: str) -> Any:
    """Return the state `key` of the parameter `weight` before the first step, like the `present` one of another."""
    if present is None:
        return None
    if key not in _FROM_ZERO or (key == _MOMENTUM and group.get("dampening")):
        raise UnsupportedError(
            f"{where}: the initial value of the state {brief(key)} is not known to be zero, so this state cannot be "
            "created for parameters without states.",
            _UNFILLED,
        )
    if not isinstance(present, LazyTensor):
        return type(present)(0)
    return Zeros(present.dtype, () if key == _STEP else weight.shape)


def _with_step(state: Any) -> Any:
    step = state.get(_STEP) if isinstance(state, Mapping) else None
    if type(step) not in (int, float) or not state.keys() <= _OF_TORCH:
        return state
    return {**state, _STEP: Inline(struct.pack("<f", step), DTYPES["float32"], ())}


def _completed(group: Mapping[str, Any], is_adam: bool) -> dict[str, Any]:
    settings = _MUON if group.get("use_muon") is True else ADAM if is_adam and "betas" in group else {}
    if not (settings or is_adam):
        return dict(group)
    missing = {key: value for key, value in settings.items() if key not in group}
    params = group.get(_PARAMS, [])
    return {**{key: value for key, value in group.items() if key != _PARAMS}, **missing, _PARAMS: params}
