"""An optimizer's states in a directory of torch.distributed.checkpoint, beside files of ranks with the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from checkpoints import assert_same, ckptconv_here, done, load_with_aliases
from dtensors import placed
from features.dcp.cases import checkpoint_of
from features.ranks.rank_files import write
from torch.distributed.tensor import Shard

WEIGHT = torch.arange(12.0).reshape(6, 2)


def test_files_of_ranks_are_the_model_beside_an_optimizer_in_a_directory(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoint-10"
    held = {"weight": WEIGHT}
    write(
        step,
        (2,),
        lambda mesh, rank: {name: placed(value, mesh, Shard(0)) for name, value in held.items()},
        "pytorch_model_fsdp_rank{}.bin",
    )
    shutil.copytree(checkpoint_of("fsdp2_w2_nested"), step / "optimizer_0")
    done(ckptconv_here("convert", tmp_path / "run", tmp_path / "out", "--no-fsync"))
    assert_same(load_with_aliases(tmp_path / "out"), held)
