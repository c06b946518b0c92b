"""Load a checkpoint of any format into a model of transformers, built on the meta device.

    python examples/load_transformers.py CONFIG_DIRECTORY CHECKPOINT

With `dispatched`, accelerate places the layers on the devices that there are, and each tensor is read on its way there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from transformers import AutoConfig, AutoModelForCausalLM

import ckptconv


def loaded(config: Any, checkpoint: str, **options: Any) -> Any:
    """Return a model with the tensors of the checkpoint as its own; `options` are those of `load_state_dict`."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(ckptconv.load_state_dict(checkpoint, **options), assign=True, strict=False)
    model.tie_weights()
    lacking = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if lacking:
        raise ValueError(f"{checkpoint} lacks {lacking}")
    return model.eval()


def dispatched(config: Any, checkpoint: str, dtype: torch.dtype = torch.float32, **limits: Any) -> Any:
    """Return a model whose layers accelerate has placed; `limits` are those of `infer_auto_device_map`."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    places = infer_auto_device_map(model, dtype=dtype, no_split_module_classes=model._no_split_modules, **limits)
    with ckptconv.open(checkpoint) as tensors:
        for name in dict(model.named_parameters()):
            device = places[
                max((place for place in places if f"{name}.".startswith(f"{place}." if place else "")), key=len)
            ]
            set_module_tensor_to_device(model, name, device, value=tensors[name].torch(), dtype=dtype)
    model.tie_weights()
    return dispatch_model(model, device_map=places).eval()


def main() -> None:
    directory, checkpoint = sys.argv[1:]
    model = loaded(AutoConfig.from_pretrained(directory), checkpoint)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters of {type(model).__name__}")


if __name__ == "__main__":
    main()
