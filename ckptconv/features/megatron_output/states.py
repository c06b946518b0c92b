"""The states of Megatron-core's distributed optimizer in their `fully_reshardable` form. Pure.

Source: megatron/core/optimizer/{__init__,optimizer,distrib_optimizer}.py of Megatron-core 0.16 to 0.19. There, each
state of a parameter is stored like the parameter, as optimizer.state.<state>.<parameter>, with `param` for the fp32
master.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.features.dcp_output.contents import DEFAULT_OPTIMIZER_KEY, DcpContents
from ckptconv.features.megatron_core.arguments import HEAD
from ckptconv.features.megatron_output.sharding import Sharded, sharded
from ckptconv.tensors import casting
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some

_MOMENTS, _MASTER = ("exp_avg", "exp_avg_sq"), "param"
_MASTERS = (_MASTER, "fp32_param", "master_param")
_KNOWN = {*_MOMENTS, *_MASTERS, "step"}
_FULL, _HALVES = "float32", ("bfloat16", "float16")
# A buffer, which is not trained.
_BUFFERS = (".expert_bias",)
ADVICE = "Leave out --states to write the weights alone."


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
            f"{where}: Megatron-core's optimizer requires {' and '.join(_MOMENTS)} for every parameter, but not both "
            f"exist for {some(lacking)}.",
            f"To write zeros for them if other parameters have these states, use --fill-states. {ADVICE}",
        )
    kinds: dict[str, dict[str, LazyTensor]] = {key: {} for key in (*_MOMENTS, _MASTER)}
    for name, weight in trained.items():
        state = states.by_parameter[name]
        others = [key for key, value in state.items() if key not in _KNOWN and isinstance(value, LazyTensor)]
        if others:
            raise UnsupportedError(
                f"{where}: {name} has the states {some(others)}, which Megatron-core's Adam does not support.", ADVICE
            )
        for key in _MOMENTS:
            kinds[key][name] = _widened(state[key], f"{where}: {name}.{key}")
        master = next((key for key in _MASTERS if key in state), "")
        kinds[_MASTER][name] = _widened(state[master] if master else weight, f"{where}: {name}.{master}".rstrip("."))
    return {f"optimizer.state.{key}": sharded(tensors, to, where) for key, tensors in kinds.items()}


def remarks(states: States, weights: Mapping[str, LazyTensor]) -> list[str]:
    """Return warnings of states without a weight, and of weights in 16 bits without a master."""
    unknown = [name for name in states.by_parameter if name not in weights and name != HEAD]
    own = {name for name, state in states.by_parameter.items() if {*_MASTERS} & state.keys()}
    short = [name for name, weight in weights.items() if weight.dtype.name != _FULL and name not in own]
    rounded = [name for name in short if name in states.by_parameter]
    warnings = []
    if unknown:
        warnings.append(f"left out, because the input has no weights for these states: {some(unknown)}")
    if rounded:
        warnings.append(
            "the fp32 masters were taken from weights of lower precision, because the input has no masters: "
            f"{some(rounded)}"
        )
    return warnings


def _widened(tensor: LazyTensor, called: str) -> LazyTensor:
    """Return `tensor` in fp32. Raise UnsupportedError for numbers that mean something else, or have more digits."""
    if tensor.dtype.name not in (_FULL, *_HALVES):
        raise UnsupportedError(
            f"{called} is {tensor.dtype}. Megatron-core stores states in float32; only states in "
            f"{' and '.join(_HALVES)} are converted to float32.",
            ADVICE,
        )
    return tensor if tensor.dtype.name == _FULL else casting.cast(tensor, DTYPES[_FULL])
