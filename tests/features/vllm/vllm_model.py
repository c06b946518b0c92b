"""Loads a Llama into vLLM itself, on the CPU, by the loader that its entry points name.

vLLM's wheel is for GPUs: it is told that it is on a CPU, and what frees a GPU's memory does nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import vllm.platforms
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()
torch.accelerator.empty_cache = lambda: None

from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.config.load import LoadConfig  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402

place = Path(sys.argv[1])
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, architectures=["LlamaForCausalLM"], dtype="float32", max_position_embeddings=64,
)  # fmt: skip
config.save_pretrained(place)
want = LlamaForCausalLM(config).state_dict()
torch.save({"model": want, "epoch": 3}, place / "train.pt")

load_general_plugins()
extra = {"checkpoint": str(place / "train.pt"), "key": "model"}
load = LoadConfig(load_format="ckptconv", model_loader_extra_config=extra)
model_config = ModelConfig(model=str(place), skip_tokenizer_init=True, dtype="float32", enforce_eager=True)
whole = VllmConfig(model_config=model_config, load_config=load, device_config=DeviceConfig("cpu"))
with set_current_vllm_config(whole):
    init_distributed_environment(1, 0, f"file://{place}/meeting", 0, backend="gloo")
    initialize_model_parallel(1, 1)
    got = dict(get_model_loader(load).load_model(vllm_config=whole, model_config=model_config).named_parameters())

used = 0
for name, tensor in got.items():
    parts = [name]
    if "qkv_proj" in name:
        parts = [name.replace("qkv_proj", f"{each}_proj") for each in "qkv"]
    elif "gate_up_proj" in name:
        parts = [name.replace("gate_up_proj", f"{each}_proj") for each in ("gate", "up")]
    expected = torch.cat([want[each] for each in parts])
    assert torch.equal(tensor[: len(expected)], expected), name
    used += len(parts)
assert used == len(want)
print("loaded", used, "tensors")
