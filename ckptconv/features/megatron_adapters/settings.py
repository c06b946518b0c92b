"""PEFT's settings of adapters: those that Megatron-Bridge has none of, and those that follow from its own. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ckptconv.features.megatron_adapters.training import Trained
from ckptconv.features.merge.files import Adapter
from ckptconv.features.merge.peft import PREFIX
from ckptconv.formats.adapter_names import FACTOR
from ckptconv.formats.source import ADAPTER_CONFIG

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_MODEL = "base_model_name_or_path"


def others(adapter: Adapter) -> list[str]:
    """Return the parts of an adapter of PEFT that LoRA of Megatron-Bridge has none of."""
    scale = adapter.scale
    parts = {
        "use_dora": scale.dora,
        "use_rslora": scale.rooted,
        "fan_in_fan_out": adapter.turned,
        "rank_pattern": scale.ranks,
        "alpha_pattern": scale.alphas,
        "target_parameters": adapter.parameters,
        "modules_to_save": adapter.saved,
        "trainable_token_indices": adapter.tokens,
        "lora_bias": adapter.has_bias,
    }
    return [name for name, value in parts.items() if value]


def configuration(told: Trained, names: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration of an adapter with factors of these `names`, trained as `told`, and notes on the
    settings that the training does not record."""
    modules = sorted({match["module"].removeprefix(PREFIX) for name in names if (match := FACTOR.fullmatch(name))})
    ends = sorted({module.rpartition(".")[2] for module in modules})
    is_everywhere = len(modules) == len(layers_in(modules)) * len(ends)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        _MODEL: told.model or None,
        "r": told.dim,
        "lora_alpha": told.alpha,
        "lora_dropout": told.dropout,
        "bias": "none",
        "inference_mode": True,
        # Modules of all layers are called by the ends of their names, as PEFT does it.
        "target_modules": ends if is_everywhere else modules,
    }
    notes = []
    if not told.model:
        notes.append(f"{ADAPTER_CONFIG} has no {_MODEL}, because {told.path} does not specify it.")
    if told.after and told.dropout:
        notes.append(
            f"PEFT applies dropout before the first factor, but {told.path} applies it after: further training differs."
        )
    return config, notes


def layers_in(names: Iterable[str]) -> list[str]:
    """Return the numbers of the layers that have one of these names."""
    return [*dict.fromkeys(match[1] for name in names if (match := _LAYER.search(name)))]
