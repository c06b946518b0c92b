"""Megatron-core's models, as the mappings of Megatron-Bridge convert them.

The models themselves need Transformer Engine, and so a GPU: what is converted is a state dict of transformers' model,
into the names and layouts that the mappings give it, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from maps.alone import only
from maps.cases import Case, Tensors, numbered, same
from maps.megatron import alone

PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformers")
_MODELS = "megatron.bridge.models"


class _Bridge:
    """What the bridges of models inherit from."""

    @staticmethod
    def register_bridge(**_: object) -> Callable[[type], type]:
        return lambda bridge: bridge


_, _, _mappings, _gemma, _gemma2, _gemma3 = only(
    f"{_MODELS}.conversion.utils", f"{_MODELS}.conversion.mapping_registry", f"{_MODELS}.conversion.param_mapping",
    *(f"{_MODELS}.gemma.{each}_bridge" for each in ("gemma", "gemma2", "gemma3")),
    packages=("megatron.bridge",), instead={f"{_MODELS}.conversion.model_bridge.MegatronModelBridge": _Bridge},
)  # fmt: skip

_BASE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 37, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# By case: the map, the bridge, the kind in transformers.
_CASES = {
    "megatron-gemma": ("megatron-gemma", _gemma.GemmaBridge, "gemma"),
    "megatron-gemma2": ("megatron-gemma2", _gemma2.Gemma2Bridge, "gemma2"),
    "megatron-gemma2-3": ("megatron-gemma2", _gemma3.Gemma3ModelBridge, "gemma3_text"),
}


class Module(torch.nn.Module):
    """Stands for every module of a model of Megatron-core, on one rank."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)


_mappings.AutoMapping.register_module_type("Module", "column")


def cases() -> Iterator[Case]:
    with alone():
        for name, (map_, bridge, kind) in _CASES.items():
            hf_config = {**_BASE, "model_type": kind}
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_BASE))
            tied = model.config.tie_word_embeddings
            hf = numbered(
                {name: each for name, each in model.state_dict().items() if not tied or name != "lm_head.weight"}
            )
            ours, back = _convert(bridge(), hf)
            if not same(back, hf):
                raise ValueError(f"{name}: megatron_to_hf does not undo hf_to_megatron")
            made = f"mapping_registry of Megatron-Bridge's {bridge.__name__}, both ways"
            yield Case(name, map_, ours, hf, hf_config, made, PACKAGES)


def _convert(bridge: Any, hf: Tensors) -> tuple[Tensors, Tensors]:
    """Return what the mappings make of `hf`, and of that again."""
    registry = bridge.mapping_registry()
    module = Module(
        num_attention_heads=6, num_query_groups=2, kv_channels=8, hidden_size=24, attention_output_gate=False,
    )  # fmt: skip
    ours: Tensors = {}
    back: Tensors = {}
    for name in hf:
        mapping = registry.hf_to_megatron_lookup(name)
        if mapping.megatron_param in ours:
            continue
        of = mapping.hf_param
        given = hf[of] if isinstance(of, str) else {key: hf[each] for key, each in of.items()}
        ours[mapping.megatron_param] = made = mapping.hf_to_megatron(given, module)
        back |= mapping.megatron_to_hf(made, module)
    return ours, back
