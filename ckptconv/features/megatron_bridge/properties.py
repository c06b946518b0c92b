"""The properties of a model in Megatron-Bridge, as the arguments of a training in Megatron-LM that say the same.

Source: Megatron-Bridge 0.3.1 to 0.6.2, models/{gpt,mla}_provider.py and utils/vocab_utils.py. A provider of models has
the settings of Megatron-core among its own; other models have them in a part, `transformer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptconv.features.megatron_bridge.run_config import TARGET, run_config
from ckptconv.features.megatron_core.arguments import GROUPS, INTERPOLATION, LAYERS, PADDED, SCALES

# Arguments by the property that says them, where it has another name.
_ARGUMENTS = {
    "layernorm_epsilon": "norm_epsilon", "num_moe_experts": "num_experts", "seq_length": "max_position_embeddings",
    "rope_scaling": SCALES, "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "seq_len_interpolation_factor": INTERPOLATION,
}  # fmt: skip
_MULTIPLES = ("make_vocab_size_divisible_by", "tensor_model_parallel_size")
_SILU = "torch.nn.functional.silu"


class Stated(NamedTuple):
    """Arguments that the file `path` states; none, for the reason `why`. `note` is a sentence on their meaning."""

    args: Mapping[str, Any] = {}
    path: str = ""
    note: str = ""
    why: str = ""


def stated(path: str, stores: Mapping[str, Any]) -> Stated:
    """Return the arguments in the configuration next to the step at `path`."""
    config = run_config(path, stores)
    args = arguments_of(config.part("model"))
    if not args:
        return Stated(why=config.why or f"{config.path} describes no model with layers")
    return Stated(args, config.path, "Its max_position_embeddings is the sequence length of the training run.")


def arguments_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the properties of a model say; none if it has no layers."""
    inner = model.get("transformer")
    own = {**model, **inner} if isinstance(inner, Mapping) else model
    if LAYERS not in own:
        return {}
    activation = own.get("activation_func")
    is_silu = isinstance(activation, Mapping) and activation.get(TARGET) == _SILU
    return {
        **own,
        **{argument: own[name] for name, argument in _ARGUMENTS.items() if name in own},
        "swiglu": is_silu and bool(own.get("gated_linear_unit")),
        "group_query_attention": own.get(GROUPS) is not None,
        PADDED: _padded(own),
    }


def _padded(model: Mapping[str, Any]) -> Any:
    """Return the number of rows of the embeddings: a multiple of a number for each tensor-parallel rank, if it pads."""
    rows: Any = model.get("vocab_size")
    factors = [model.get(name, 1) for name in _MULTIPLES]
    if not model.get("should_pad_vocab") or not all(type(number) is int and number > 0 for number in (rows, *factors)):
        return rows
    return rows + -rows % math.prod(factors)
