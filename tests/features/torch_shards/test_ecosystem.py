"""transformers loads what a sharded set of `.bin` files is converted to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import ckptconv_here
from test_ecosystem import answers, ties, trained, with_config

__all__ = ["trained"]


def test_a_sharded_set_of_bin_files_becomes_one_of_safetensors(trained: Any, tmp_path: Path) -> None:
    directory = with_config(trained, tmp_path / "model")
    state = {name: tensor for name, tensor in trained.state_dict().items() if name not in ties(trained)}
    half = len(state) // 2
    parts = [dict(list(state.items())[:half]), dict(list(state.items())[half:])]
    names = [f"pytorch_model-{number:05d}-of-00002.bin" for number in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, directory / name)
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert ckptconv_here("pt2safetensors", directory / "pytorch_model.bin.index.json", directory).code == 0
    for name in (*names, "pytorch_model.bin.index.json"):
        (directory / name).unlink()
    model = type(trained).from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(answers(model.eval()), answers(trained))
