"""DistributedReader, of checkpoints of DeepSpeed."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from checkpoints import ZERO, assert_same
from safetensors.torch import load_file

from ckptconv import DistributedReader


def test_torch_loads_it_like_any_other_checkpoint() -> None:
    expected = load_file(ZERO / "z3_bf16_untied_w2" / "expected.safetensors")
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    reader = DistributedReader(ZERO / "z3_bf16_untied_w2/checkpoint", model_key="model")
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert_same(state["model"], expected)
