"""Load a checkpoint of any format into a model sharded by FSDP2: each rank reads only the bytes of its own shards.

    torchrun --nproc-per-node 2 examples/load_fsdp2.py CHECKPOINT

The model is a stand-in with the shapes of the checkpoint; a real program calls `load` with its own model.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import ckptconv


def load(model: nn.Module, checkpoint: str) -> None:
    """Load the weights of a checkpoint into a sharded model."""
    state = get_model_state_dict(model)
    dcp.load({"model": state}, storage_reader=ckptconv.DistributedReader(checkpoint, model_key="model"))
    set_model_state_dict(model, state)


def shaped_like(checkpoint: str) -> nn.Module:
    """Return a model with a parameter for each tensor of the checkpoint."""
    model = nn.Module()
    with ckptconv.open(checkpoint) as tensors:
        for name, tensor in tensors.items():
            *above, last = name.split(".")
            module = model
            for step in above:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(last, nn.Parameter(torch.zeros(tensor.shape), requires_grad=False))
    return model


def main() -> None:
    dist.init_process_group("gloo")
    model = fully_shard(shaped_like(sys.argv[1]))
    load(model, sys.argv[1])
    sums = {name: float(tensor.full_tensor().double().sum()) for name, tensor in model.named_parameters()}
    if dist.get_rank() == 0:
        print(f"{len(sums)} tensors on {dist.get_world_size()} ranks, with the sum {sum(sums.values()):.6g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
