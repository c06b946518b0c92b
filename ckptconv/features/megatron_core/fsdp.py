"""Checkpoints of Megatron-FSDP (`fsdp_dtensor`), under the names that Megatron-core's other checkpoints have.

Source: megatron/core/transformer/fsdp_dtensor_checkpoint.py, optimizer/distrib_optimizer.py, and
tools/checkpoint/checkpoint_inspector.py of Megatron-LM with Megatron-core 0.19. Weights lie under `model`, as
`module.<parameter>`; states under `optimizer.state`, as `module.module.module.<parameter>`; the settings of each
parameter under `optimizer.param_to_group_meta`. Layers and experts keep their numbers. Gate and up of a feed-forward
layer are two tensors, `_w` and `_v`. The values that all ranks share have keys of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.features.dcp.metadata import Description
from ckptconv.features.joining.names import named, nest
from ckptconv.formats.source import Wanted
from ckptconv.formats.torch.input_log import InputLog
from ckptconv.tensors.lazy import Concat, LazyTensor

FSDP = "checkpoint of Megatron-FSDP"
_MODEL, _OPTIMIZER, _META, _STEP = "model", "optimizer", "param_to_group_meta", "step"
_WRAPPED = re.compile(r"(?:module\.)+")
_PART = re.compile(r"(.+\.mlp\..*linear_fc1\.(?:weight|bias)\d*)_([wv])", re.DOTALL)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
# Values of single ranks.
OF_RANKS = ("rng_state", "rerun_state_machine")
# The layer inside one that predicts further tokens, as it is called in modules.
INNER = (".mtp_model_layer.", ".transformer_layer.")


def is_fsdp(described: Description) -> bool:
    """Return whether a checkpoint with paths has the keys of Megatron-FSDP."""
    weights = [path for path in described.paths.values() if path[:1] == (_MODEL,)]
    is_wrapped = bool(weights) and all(_WRAPPED.match(str(path[-1])) for path in weights)
    return is_wrapped and ("checkpoint_version",) in described.paths.values()


@dataclass
class Extra:
    """The content of a checkpoint of Megatron-FSDP besides its tensors: the values that all ranks share."""

    common: dict[str, Any]
    left: list[str]
    where: str
    format: str = FSDP
    log: InputLog = field(default_factory=InputLog)
    rest: tuple[()] = ()

    def arranged(
        self,
        weights: Any,
        states: dict[str, Any] | None,
        described: Description,
        values: Mapping[str, Any],
        wanted: Wanted,
    ) -> tuple[Any, dict[str, Any] | None, CkptconvError | None]:
        """Return the weights, and the states with their groups, by the names of parameters."""
        if wanted.master:
            raise UnsupportedError(
                f"{self.where}: Megatron-FSDP's weights are already the masters.", "Leave out --master."
            )
        tree = {**_joined(weights, self.where), "common": self.common}
        _check_layers(tree, self.common.get("args"), self.where)
        if states is None:
            return tree, None, None
        settings = _settings(described, values)
        by_key: dict[str, dict[str, LazyTensor]] = {}
        for name, state in states["state"].items():
            for key, value in state.items():
                by_key.setdefault(key, {})[name] = value
        arranged: dict[str, dict[str, Any]] = {}
        for key, tensors in by_key.items():
            # All parts of a parameter have one step.
            steps = {_parameter(name): value for name, value in tensors.items()} if key == _STEP else None
            for name, value in (steps or _joined(tensors, self.where)).items():
                arranged.setdefault(name, {})[key] = value
        groups: list[dict[str, Any]] = []
        for name, state in arranged.items():
            if name not in settings:
                raise CorruptError(f"{self.where}: {named(name)} has states, but no settings under {_META}.")
            own = dict(settings[name])
            step = own.pop(_STEP, None)
            if _STEP not in state and step is not None:
                state[_STEP] = step
            group = next((group for group in groups if {**group, "params": None} == {**own, "params": None}), None)
            if group is None:
                groups.append(group := {**own, "params": []})
            group["params"].append(name)
        return tree, {"state": arranged, "param_groups": groups}, None

    def notes(self) -> list[str]:
        """Return notes for the user on the names."""
        joined = "The tensors have the names of Megatron-core's parameters. The gate (_w) and up (_v) parts are joined."
        left = [f"Left out of the record, because they are not plain data: {self.left}."] if self.left else []
        return [joined, *left]


def _bare(name: str) -> str:
    return _WRAPPED.sub("", name, count=1).replace(*INNER)


def _joined(tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return tensors by the names of parameters, with gate and up in one."""
    joined: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if match := _PART.fullmatch(_bare(name)):
            parts.setdefault(match[1], {})[match[2]] = tensor
            joined.setdefault(match[1], None)
        else:
            joined[_bare(name)] = tensor
    for name, both in parts.items():
        if both.keys() != {"w", "v"} or both["w"].shape != both["v"].shape or both["w"].dtype != both["v"].dtype:
            raise CorruptError(
                f"{where}: {named(name)} needs _w and _v with the same shape and dtype, but has {[*both]}."
            )
        joined[name] = Concat((both["w"], both["v"]), 0)
    return joined


def _check_layers(names: Iterable[str], args: Any, where: str) -> None:
    """Raise UnsupportedError if layers of several pipeline-parallel stages are stored under the same names."""
    args = args if isinstance(args, Mapping) else {}
    stages, layers = args.get("pipeline_model_parallel_size"), args.get("num_layers")
    stored = len({match[1] for name in names if (match := _LAYER.match(name))})
    if type(stages) is int and type(layers) is int and stages > 1 and stored < layers:
        raise UnsupportedError(
            f"{where} contains {stored} of the {layers} layers. Megatron-FSDP stored the layers of {stages} "
            "pipeline-parallel stages under the same names, so only those of one stage are left.",
            "Save it again from a training run with one pipeline-parallel stage, or as torch_dist.",
        )


def _parameter(name: str) -> str:
    bare = _bare(name)
    match = _PART.fullmatch(bare)
    return match[1] if match else bare


def _settings(described: Description, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of each parameter: those of its group."""
    settings: dict[str, dict[str, Any]] = {}
    for key, path in described.paths.items():
        if path[:2] == (_OPTIMIZER, _META) and key in values and len(path) > 3:
            settings.setdefault(_parameter(str(path[2])), {})[str(path[3])] = values[key]
    return settings


def shared(described: Description, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that all ranks share, as other checkpoints have them: none of ranks, and none of parameters."""
    leaves = {
        described.paths[key]: value
        for key, value in values.items()
        if key in described.paths and described.paths[key][0] not in (_MODEL, _OPTIMIZER, *OF_RANKS)
    }
    return dict(nest(leaves, "common")) if leaves else {}
