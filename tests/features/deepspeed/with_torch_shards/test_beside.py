"""A step of DeepSpeed and a sharded set of torch.save in one directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from checkpoints import ZERO, assert_same, ckptconv_here, done, load_with_aliases
from safetensors.torch import load_file


def test_a_directory_that_also_holds_a_set_of_torch(tmp_path: Path) -> None:
    """As the Trainer of transformers leaves it: each command takes what is its own."""
    directory = Path(shutil.copytree(ZERO / "z3_bf16_w2/checkpoint", tmp_path / "in"))
    names = {f"w{number}": f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)}
    for name, file in names.items():
        torch.save({name: torch.full((3,), float(name[1]))}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    done(ckptconv_here("pt2safetensors", directory, tmp_path / "pt"))
    assert_same(load_with_aliases(tmp_path / "pt"), {name: torch.full((3,), float(name[1])) for name in names})
    done(ckptconv_here("zero-to-fp32", directory, tmp_path / "zero.safetensors"))
    assert "emb.weight" in load_file(tmp_path / "zero.safetensors")
