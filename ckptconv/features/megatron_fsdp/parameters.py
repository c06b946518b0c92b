"""Give each parameter the name and the tensor that it has in a model of Megatron-FSDP. Pure.

Source: megatron/core/transformer/fsdp_dtensor_checkpoint.py and optimizer/distrib_optimizer.py of Megatron-core 0.16 to
0.19. Layers and experts have tensors of their own there. The gate and the upper part of a feed-forward layer, which
tensor-parallel ranks cut apart, are two tensors, `_w` and `_v`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import UnsupportedError
from ckptconv.features.dcp_output.optimizer import ADAM
from ckptconv.features.joining.names import named
from ckptconv.features.megatron_core.fsdp import INNER
from ckptconv.features.megatron_core.optimizers import identifier
from ckptconv.features.megatron_output.groups import OF_EXPERTS, is_vector
from ckptconv.features.megatron_output.sharding import Sharded, is_of_expert, is_stacked
from ckptconv.features.megatron_output.states import ADVICE
from ckptconv.tensors.lazy import LazyTensor, Narrow, View

_FIRST = re.compile(r"(.+\.mlp\..*)linear_fc1(\.(?:weight|bias)\d*)", re.DOTALL)
# Settings that a loading training asks for in each group, if its source does not say them: those of torch's Adam and of
# Megatron-core.
_SETTINGS = {**ADAM, "default_config": True}


def apart(stored: Sharded) -> dict[str, LazyTensor]:
    """Return the tensors of each layer and expert, of those that are stored in one."""
    return {
        name.replace(INNER[1], INNER[0]): tensor
        for whole, one in stored.tensors.items()
        for name, tensor in _of_layers(whole, one)
    }


def _of_layers(name: str, tensor: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
    if not is_stacked(name):
        yield from _of_experts(name, tensor)
        return
    above, _, below = name.rpartition("layers.")
    for number, layer in enumerate(_elements(tensor)):
        yield from _of_experts(f"{above}layers.{number}.{below}", layer)


def _of_experts(name: str, tensor: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
    if ".experts.experts." not in name:
        yield name, tensor
        return
    for number, expert in enumerate(_elements(tensor)):
        yield f"{name.replace('.experts.experts.', '.experts.')}{number}", expert


def _elements(tensor: LazyTensor) -> Iterator[LazyTensor]:
    for number in range(tensor.shape[0]):
        yield View(Narrow(tensor, 0, number, 1), tensor.dtype, tensor.shape[1:])


def gated(parameters: Mapping[str, LazyTensor], where: str) -> frozenset[str]:
    """Return the names of parameters that have a gate: their matrix has twice the rows that the next one has columns.

    Raise UnsupportedError if it has another number of rows.
    """
    names = []
    for name, tensor in parameters.items():
        match = _FIRST.fullmatch(name)
        if match is None:
            continue
        after = parameters.get(f"{match[1]}linear_fc2{match[2].replace('bias', 'weight')}")
        times = 0 if after is None else tensor.shape[0] / after.shape[1]
        if times not in (1, 2):
            raise UnsupportedError(
                f"{where}: {named(name)} has {tensor.shape[0]} rows, which does not determine whether it has a gate."
            )
        if times == 2:
            names.append(name)
    return frozenset(names)


def divided(parameters: Mapping[str, LazyTensor], with_gate: frozenset[str]) -> Iterator[tuple[str, LazyTensor]]:
    """Yield `parameters`; of those with a gate, both parts."""
    for name, tensor in parameters.items():
        if name not in with_gate:
            yield name, tensor
            continue
        half = tensor.shape[0] // 2
        yield f"{name}_w", Narrow(tensor, 0, 0, half)
        yield f"{name}_v", Narrow(tensor, 0, half, half)


def settings(optimizer: Mapping[Any, Any], parameters: Mapping[str, LazyTensor], where: str) -> dict[str, Any]:
    """Return the settings of each parameter: those of its group in the values of an `optimizer`, or of several.

    Raise UnsupportedError if more than one group, or none, can be that of a parameter.
    """
    parts = [optimizer] if "optimizer" in optimizer else list(optimizer.values())
    groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
    chosen: dict[str, Any] = {}
    for name, tensor in parameters.items():
        of_expert = is_of_expert(name)
        own = [group for group in groups if of_expert and group[OF_EXPERTS]]
        own = own or [group for group in groups if not group[OF_EXPERTS]]
        mine = [group for group in own if bool(identifier(group, "wd_mult")) != is_vector(name, tensor)]
        # One group may be there twice, with and without rates.
        if not mine or any(mine[0].get(key, value) != value for group in mine for key, value in group.items()):
            raise UnsupportedError(
                f"{where}: {len(mine)} groups of the optimizer can contain {named(name)}, and the checkpoint does "
                "not record which one does."
                if mine
                else f"{where}: no group of the optimizer has settings for {named(name)}.",
                ADVICE,
            )
        chosen[name] = {**_SETTINGS, **mine[0]}
    return chosen
