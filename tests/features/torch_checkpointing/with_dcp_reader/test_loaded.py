"""A step that torch.distributed.checkpoint loads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same
from features.torch_checkpointing.test_steps import REAL
from safetensors.torch import load_file

from ckptconv import DistributedReader


def test_states_and_settings_are_loaded_beside_the_weights() -> None:
    expected = load_file(REAL / "2d-2x2-st" / "optimizer.safetensors")
    states: dict[str, dict[str, Any]] = {}
    for name, tensor in expected.items():
        parameter, _, key = name.rpartition(".")
        states.setdefault(parameter, {})[key] = torch.zeros_like(tensor)
    state = {
        "model": {"up.weight": torch.zeros(10, 8)},
        "optimizer": {"state": states, "param_groups": [{"lr": 0.5, "params": list(states)}]},
    }
    step = REAL / "2d-2x2-st" / "step-2"
    dcp.load(state, storage_reader=DistributedReader(step, model_key="model", states=step), no_dist=True)
    assert torch.equal(state["model"]["up.weight"], load_file(REAL / "2d-2x2-st" / "expected.safetensors")["up.weight"])
    got = {f"{name}.{key}": tensor for name, own in states.items() for key, tensor in own.items()}
    assert_same(got, expected)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.01
