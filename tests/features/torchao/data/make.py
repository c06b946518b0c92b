"""Makes the files beside it, with the release of torchao that is installed (0.18.0): python make.py

Each is a state dict of a tiny model, as torch.save writes it, and as torchao's own torchao.prototype.safetensors does.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

CASES = {
    "float8": Float8WeightOnlyConfig(),
    "int8": Int8DynamicActivationInt8WeightConfig(version=2),
    "intx": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "mx": MXDynamicActivationMXWeightConfig(),
}

here = Path(__file__).parent
for name, config in CASES.items():
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 8), torch.nn.LayerNorm(8)
    model = torch.nn.Sequential(*linear).to(torch.bfloat16)
    quantize_(model, config)
    state = dict(model.state_dict())
    torch.save(state, here / f"{name}.pt")
    tensors, metadata = flatten_tensor_state_dict(state)
    save_file(tensors, here / f"{name}.safetensors", metadata)
