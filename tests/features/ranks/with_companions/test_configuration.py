"""The configuration of a model that was saved in files of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from cells import VERIFY
from dtensors import placed
from features.ranks.rank_files import converted, write
from torch.distributed.tensor import Shard


def test_the_configuration_that_verl_writes_beside_is_copied(tmp_path: Path) -> None:
    write(tmp_path / "in", (2,), lambda mesh, rank: {"weight": placed(torch.ones(9, 4), mesh, Shard(0))})
    (tmp_path / "in" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    (tmp_path / "in" / "huggingface").mkdir()
    config = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    (tmp_path / "in" / "huggingface" / "config.json").write_text(config)
    (tmp_path / "in" / "huggingface" / "tokenizer.json").write_text("{}")
    converted(tmp_path / "in", tmp_path / "hub", "--for-hub", *VERIFY)
    assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    converted(tmp_path / "in", tmp_path / "plain")
    assert not (tmp_path / "plain" / "config.json").exists()
