"""Names of adapters in steps of Megatron-Bridge, and the adapters that have no map. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckptconv.errors import CkptconvError, UnsupportedError
from ckptconv.features.megatron_core.arguments import ADAPTER
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import quoted

# The ends of the names of its factors: the product is that of the second and the first.
IN, OUT = f"{ADAPTER}linear_in.weight", f"{ADAPTER}linear_out.weight"
# Advice about adapters of PEFT that are no LoRA of Megatron-Bridge.
JOINED = (
    "LoRA of Megatron-Bridge adapts q, k and v together, with one first factor (lora_A), and so gate and up. An "
    "adapter that PEFT trained has one for each: add it to its model with ckptconv merge."
)
# Adapters without a map, by a pattern of their names: those of other forms, then those of other modules.
_OTHERS = (
    (r".*\.adapter\.adapter_\w+\..+", "CanonicalLoRA, with a factor of its own for each of q, k, v, gate and up"),
    (r".*\.adapter\.weight_magnitude", "DoRA, with the lengths of rows"),
    (r".*\.(?:shared_experts|experts|local_experts)\..+", "experts"),
    (r".*\.router\..+", "a router of experts"),
    (r".*\.in_proj\..+", "the input projection of linear attention or Mamba"),
    (r".*\.adapter\.linear_(?:in|out)\.(?!weight$).+", "a form in which a factor is not one matrix"),
)


def adapters_in(weights: Any) -> dict[str, LazyTensor]:
    """Return the tensors of adapters among the weights of a source, by name."""
    leaves = weights.items() if isinstance(weights, Mapping) else ()
    return {name: leaf for name, leaf in leaves if isinstance(leaf, LazyTensor) and ADAPTER in name}


def unmapped(path: str, names: Iterable[str]) -> CkptconvError | None:
    """Return the error for the first adapter among `names` that has no map; None if there is none."""
    for name in names:
        kind = next((kind for pattern, kind in _OTHERS if re.fullmatch(pattern, name, re.DOTALL)), "")
        if kind and ADAPTER in name:
            return UnsupportedError(
                f"{path} has an adapter of {kind}, {quoted(name)}, for which there is no map to PEFT's names.",
                "Without --map, it is converted under the names of Megatron-core.",
            )
    return None


def matrix_of(name: str) -> str:
    """Return the module that a part of an adapter, of this `name`, adapts."""
    return name.partition(ADAPTER)[0]
