"""Models of NeMo 2, which are Megatron-core's, as NeMo's exporters convert them.

Their parameters are those of Megatron-core's own layers under the names of Transformer Engine's, which needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from maps.alone import only
from maps.cases import Case, Tensors, numbered
from maps.megatron import BASE, alone, gpt_model, with_names

PACKAGES = ("torch", "megatron-core", "nemo_toolkit", "transformers")
_One = TypeVar("_One")
_Other = TypeVar("_Other")


class _Connector(Generic[_One, _Other]):
    """What the exporters inherit from."""


def _decorator(*_: object, **__: object) -> Any:
    return lambda exporter: exporter


(_state,) = only("nemo.lightning.io.state", packages=("nemo",))
_KINDS = ("phi3mini", "qwen2", "qwen3", "mistral")
_phi3, _qwen2, _qwen3, _mistral = only(
    *(f"nemo.collections.llm.gpt.model.{each}" for each in _KINDS), packages=("nemo",),
    instead={
        "nemo.lightning.io.apply_transforms": _state.apply_transforms,
        "nemo.lightning.io.state_transform": _state.state_transform,
        "nemo.lightning.io.model_exporter": _decorator, "nemo.lightning.io.model_importer": _decorator,
        "nemo.lightning.io.ModelConnector": _Connector,
        "nemo.collections.llm.gpt.model.base.GPTConfig": type("GPTConfig", (), {"__annotations__": {}}),
        "nemo.collections.llm.gpt.model.base.GPTModel": type("GPTModel", (), {}),
    },
)  # fmt: skip

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# By case: the map, the exporter, the kind in transformers, its settings, and Megatron-core's.
_MODELS: dict[str, tuple[str, Any, str, dict[str, Any], dict[str, Any]]] = {
    "megatron-phi3": ("megatron-phi3", _phi3.HFPhi3Exporter, "phi3", {"head_dim": 4}, {}),
    "nemo-mistral": ("megatron-llama", _mistral.HFMistralExporter, "mistral", {}, {}),
    "nemo-qwen2": ("megatron-qwen2", _qwen2.HFQwen2Exporter, "qwen2", {"head_dim": 4}, {"add_qkv_bias": True}),
    "nemo-qwen3": ("megatron-qwen3", _qwen3.HFQwen3Exporter, "qwen3", {}, {"qk_layernorm": True}),
}


def cases() -> Iterator[Case]:
    with alone():
        for name, (map_, exporter, kind, more, settings) in _MODELS.items():
            hf_config = {**BASE, **_IDS, **more}
            padded = kind != "phi3"  # of which the exporter leaves the padding
            with torch.device("meta"):
                shapes = with_names(gpt_model(hf_config, settings, padded=padded).state_dict())
            ours = numbered(shapes)
            hf = _exported(exporter, ours, AutoConfig.for_model(kind, **hf_config), hf_config)
            made = f"convert_state of NeMo's {exporter.__name__}"
            yield Case(name, map_, ours, hf, {**hf_config, "model_type": kind}, made, PACKAGES,
                back=_unpadded(ours) if padded else {})  # fmt: skip


def _exported(exporter: Any, ours: Tensors, config: Any, hf_config: dict[str, Any]) -> Tensors:
    """Return what `exporter` puts into a model of transformers."""
    target = AutoModelForCausalLM.from_config(config)
    source = SimpleNamespace(
        num_attention_heads=hf_config["num_attention_heads"], num_query_groups=hf_config["num_key_value_heads"],
        hidden_size=hf_config["hidden_size"], kv_channels=hf_config["head_dim"],
        ffn_hidden_size=hf_config["intermediate_size"], vocab_size=hf_config["vocab_size"],
    )  # fmt: skip
    converter = type("Exporter", (exporter,), {"config": config, "tokenizer": None})()
    made: Tensors = dict(converter.convert_state(_state._ModelState(ours, source), target).state_dict())
    return made


def _unpadded(ours: Tensors) -> Tensors:
    """Return the tensors whose padding comes back as zeros."""
    back = {}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        back[name] = ours[name].clone()
        back[name][BASE["vocab_size"] :] = 0
    return back
