"""torchtune's models, as its functions convert them.

Its packages ask for a torchao that this torch does not load: only the modules that convert are imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from maps.cases import Case, numbered, same

PACKAGES = ("torch", "torchtune", "transformers")
_PLACE = Path((importlib.util.find_spec("torchtune") or sys.__spec__).origin or "").parent
for _name in ("torchtune", "torchtune.models", *(f"torchtune.models.{each}" for each in ("gemma2", "phi3", "qwen2"))):
    _package = ModuleType(_name)
    _package.__path__ = [str(_PLACE.joinpath(*_name.split(".")[1:]))]
    sys.modules[_name] = _package

_HEADS: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "dim": 24}
_BASE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 37, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# By case: the kind in transformers, and the module and the functions of torchtune, with what they have to know.
_MODELS: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "torchtune-llama": ("llama", "convert_weights", "hf_to_tune", "tune_to_hf", _HEADS),
    "torchtune-qwen2": ("qwen2", "qwen2._convert_weights", "qwen2_hf_to_tune", "qwen2_tune_to_hf", _HEADS),
    "torchtune-gemma2": ("gemma2", "gemma2._convert_weights", "gemma2_hf_to_tune", "gemma2_tune_to_hf", _HEADS),
    "torchtune-phi": ("phi3", "phi3._convert_weights", "phi3_hf_to_tune", "phi3_tune_to_hf", _HEADS),
}


def cases() -> Iterator[Case]:
    for name, (kind, module, there, back, told) in _MODELS.items():
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_BASE)).state_dict()
        hf = numbered(shapes)
        converting = import_module(f"torchtune.models.{module}")
        ours = getattr(converting, there)(dict(hf), **told)
        if not same(getattr(converting, back)(dict(ours), **({} if kind == "phi3" else told)), hf):
            raise ValueError(f"{name}: {back} does not undo {there}")
        yield Case(name, name, ours, hf, {**_BASE, "model_type": kind}, f"{there} of torchtune, and {back}", PACKAGES)
