"""Models of transformers take tensors that are maps of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import ckptconv_here
from test_ecosystem import answers, trained

import ckptconv

__all__ = ["trained"]


def test_torch_takes_it_as_memory_maps(trained: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(trained.state_dict(), path)
    assert ckptconv_here("pt2safetensors", path).code == 0
    state = ckptconv.load_state_dict(path.with_suffix(".safetensors"))
    with torch.device("meta"):
        model = type(trained)(trained.config).eval()
    buffers = dict(type(trained)(trained.config).named_buffers())
    model.load_state_dict(state, assign=True)
    assert not [name for name, parameter in model.named_parameters() if parameter.is_meta]
    for name, buffer in buffers.items():  # those that are not saved are of the model's own making
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffer)
    assert torch.equal(answers(model), answers(trained))
