"""OLMo-core's transformers, as its own functions convert their state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from olmo_core.nn.hf.convert import convert_state_from_hf, convert_state_to_hf
from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig
from transformers import AutoConfig

from maps.cases import Case, numbered, same

PACKAGES = ("torch", "ai2-olmo-core", "transformers")


def cases() -> Iterator[Case]:
    sizes: dict[str, Any] = {
        "d_model": 24, "vocab_size": 41, "n_layers": 2, "n_heads": 3, "n_kv_heads": 1, "hidden_size_multiple_of": 4,
        "hidden_size_multiplier": 0.25,
    }  # fmt: skip
    # The norms of OLMo 2 and 3 stand behind attention and feed-forward layers.
    olmo: dict[str, Any] = {"block_name": TransformerBlockType.reordered_norm, "qk_norm": True}
    for name, model_type, more in (("olmo_core", "olmo2", olmo), ("olmo_core-llama", "llama", {})):
        model = TransformerConfig.llama_like(**sizes, **more).build(init_device="cpu")
        hf_config = AutoConfig.for_model(model_type)
        ours = numbered(model.state_dict())
        hf = convert_state_to_hf(hf_config, dict(ours))
        back = convert_state_from_hf(hf_config, dict(hf), model_type=hf_config.model_type)
        if not same(back, ours):
            raise ValueError(f"{name}: convert_state_from_hf does not undo convert_state_to_hf")
        made = f"convert_state_to_hf for {model_type}, and convert_state_from_hf back"
        yield Case(name, name, ours, hf, {"model_type": model_type}, made, PACKAGES)
