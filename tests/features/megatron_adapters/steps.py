"""Steps of adapters alone, as Megatron-Bridge names and stacks them, beside models that a framework's own converter
has converted; and directories of PEFT of the same shapes.

Source: Megatron-Bridge 067f987d, peft/utils.py (`ParallelLinearAdapter.sharded_state_dict`), training/checkpointing.py
(`apply_peft_adapter_filter_to_state_dict`): the layers of a factor are one tensor, the rows of fc1's second factor are
those of gate and then those of up, and there is no other object.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from cells import of_features
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

Tensors = dict[str, torch.Tensor]
RANK, ALPHA = 2, 5
LAYERS = "decoder.layers."
MATRICES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The run_config.yaml of a training with a rank and an alpha; what is appended is a further setting of its adapters.
LORA = (
    "model:\n  hidden_size: 8\npeft:\n  _target_: megatron.bridge.peft.lora.LoRA\n  dim: {}\n  alpha: {}\n"
    "  canonical_mapping: {{}}\n  lora_A_init_method: xavier\n"
)
TRAINED = LORA.format(RANK, ALPHA)
(MAPS,) = of_features("MAPS")
CASES: Path = MAPS["data"]


class Model:
    """A tiny model as Megatron-core has it, and as its own converter gives it to transformers; and adapters of it."""

    def __init__(self, case: str) -> None:
        self.map, place = case, CASES / case
        self.megatron, self.hf = (
            {name: tensor.float() / 1024 for name, tensor in load_file(place / f"{side}.safetensors").items()}
            for side in ("ours", "hf")
        )
        self.config_file = place / "config.json"
        self.config: dict[str, Any] = json.loads(self.config_file.read_text())
        self.layers: int = self.config["num_hidden_layers"]
        torch.manual_seed(1)
        self.adapters: Tensors = {}
        for layer in range(self.layers):
            for matrix in MATRICES:
                rows, columns = self.megatron[f"{LAYERS}{layer}.{matrix}.weight"].shape
                name = f"{LAYERS}{layer}.{matrix}.adapter.linear_"
                self.adapters[f"{name}in.weight"] = torch.randn(RANK, columns)
                self.adapters[f"{name}out.weight"] = torch.randn(rows, RANK)

    def merged(self) -> Tensors:
        """The model of Megatron-core with its adapters added to its matrices."""
        added = dict(self.megatron)
        for name in self.adapters:
            module, adapter, _ = name.partition(".adapter.linear_in.weight")
            if adapter:
                left, right = self.adapters[f"{module}.adapter.linear_out.weight"], self.adapters[name]
                update = ALPHA / RANK * (left.double() @ right.double())
                added[f"{module}.weight"] = (self.megatron[f"{module}.weight"].double() + update).float()
        return added

    def stacked(self) -> Tensors:
        """The adapters as a step has them: the layers are one tensor."""
        suffixes = dict.fromkeys(name.split(".", 3)[3] for name in self.adapters)
        return {
            LAYERS + suffix: torch.stack([self.adapters[f"{LAYERS}{at}.{suffix}"] for at in range(self.layers)])
            for suffix in suffixes
        }

    def shaped(self, place: Path, modules: tuple[str, ...] = MODULES, **config: Any) -> Path:
        """A new adapter of PEFT, all of whose factors are zero."""
        place.mkdir()
        factors = {}
        for name, weight in self.hf.items():
            if name.endswith(tuple(f"{module}.weight" for module in modules)):
                module = f"base_model.model.{name.removesuffix('.weight')}"
                factors[f"{module}.lora_A.weight"] = torch.zeros(RANK, weight.shape[1])
                factors[f"{module}.lora_B.weight"] = torch.zeros(weight.shape[0], RANK)
        save_file(factors, place / "adapter_model.safetensors", {"format": "pt"})
        said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, **config}
        (place / "adapter_config.json").write_text(json.dumps({**said, "target_modules": [*modules]}))
        return place


def step(place: Path, tensors: Tensors) -> Path:
    """A step of Megatron-core with these tensors."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(tensors, checkpoint_id=place, planner=planner, no_dist=True)
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"iteration": 1, "checkpoint_version": 3.0}, place / "common.pt")
    return place


def trained(place: Path, tensors: Tensors, more: str = "", text: str = TRAINED) -> Path:
    """A step with these adapters and the configuration of their training."""
    saved = step(place, tensors)
    (saved / "run_config.yaml").write_text(text + more)
    return saved
