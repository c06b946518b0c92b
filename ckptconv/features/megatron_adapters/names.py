"""Names of adapters in steps of Megatron-Bridge, and the adapters that have no map. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckptconv.errors import CkptconvError, UnsupportedError
from ckptconv.features.megatron_core.arguments import ADAPTER
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import quoted

# The names of its factors: the product is that of the second and the first. In CanonicalLoRA, modules that
# Megatron-core joins have a part for each, such as `adapter_q`, and the name of a part comes before.
IN, OUT, PART = "linear_in.weight", "linear_out.weight", "adapter_"
_PART = re.compile(rf"(?P<above>.+?)(?:_qkv)?{re.escape(ADAPTER)}{PART}(?P<part>\w+)\..+", re.DOTALL)
# Advice about adapters of PEFT that LoRA does not have.
JOINED = (
    "LoRA of Megatron-Bridge shares one first factor (lora_A) among q, k and v, and one between gate and up. Use "
    "--like with a step of CanonicalLoRA, which has a separate factor for each, or add the adapter to its model "
    "with ckptconv merge."
)
# Adapters without a map, by a pattern of their names: those of other forms, then those of other modules.
_OTHERS = (
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
                f"{path} contains {quoted(name)}, which no map converts to PEFT's names: an adapter of {kind}.",
                "Without --map, the adapter is converted with Megatron-core's names.",
            )
    return None


def are_apart(names: Iterable[str]) -> bool:
    """Return whether adapters with these names are of CanonicalLoRA, with factors for each module."""
    return any(map(_PART.fullmatch, names))


def part_of(name: str) -> tuple[str, str]:
    """Return the module that a factor of this `name` adapts a part of, and the part; "" if it adapts all of it."""
    match = _PART.fullmatch(name)
    return (match["above"], match["part"]) if match else (name.partition(ADAPTER)[0], "")


def matrix_of(name: str) -> str:
    """Return the module that a part of an adapter, of this `name`, adapts, as `target_modules` calls it."""
    return "_".join(filter(None, part_of(name)))
