"""Load a step that DeepSpeed saved with ZeRO-3 into a running model, without an intermediate file.

    python examples/load_zero.py [CHECKPOINT]

The model is built on the meta device, where it takes no memory, and then gets the tensors. The same for a model of
transformers:

    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("gpt2"))
    state = ckptconv.load_state_dict("run/global_step1000", dtype="bf16")
    model.load_state_dict(state, assign=True)
    model.tie_weights()
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import ckptconv

STEP = Path(__file__).parents[1] / "tests/features/deepspeed/data/z3_bf16_untied_w2/checkpoint"


def shaped_like(checkpoint: ckptconv.Checkpoint) -> nn.Module:
    """Build the linear layer of the checkpoint from its shapes; a real program knows its model."""
    rows, columns = checkpoint["l1.weight"].shape
    return nn.Linear(columns, rows, bias="l1.bias" in checkpoint)


def main() -> None:
    step = sys.argv[1] if len(sys.argv) > 1 else STEP
    with ckptconv.open(step) as checkpoint, torch.device("meta"):
        print(f"{checkpoint.format} with {len(checkpoint)} tensors")
        model = shaped_like(checkpoint)
    state = ckptconv.load_state_dict(step, dtype="bf16")
    prefix = "l1."
    own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    model.load_state_dict(own, assign=True)
    outputs = model(torch.ones(1, model.in_features, dtype=torch.bfloat16))
    print(f"outputs of shape {list(outputs.shape)}, without a file in between")


if __name__ == "__main__":
    main()
