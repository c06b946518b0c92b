"""A file of a rank that is a copy of another one's is known in the stream format too, which DeepSpeed writes without
checkpoint_serialization: it has neither a name nor checksums."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, load_with_aliases
from features.deepspeed.zero_writer import TAG, Model, Save, values, write

from ckptconv.conversion import convert
from ckptconv.errors import CorruptError


def written(place: Path, weight: torch.Tensor) -> Path:
    """Write a step of two ranks, of which the second has a copy of the first one's file."""
    tag = write(place, Model([{"w": weight}]), Save(stage=3, stream=True)) / TAG
    one, two = (tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    shutil.copy(one, two)
    return tag


def test_a_copy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"contain identical partitions.*copy of the other"):
        convert(written(tmp_path / "step", values(40)), tmp_path / "model.safetensors", family="deepspeed")
    assert not (tmp_path / "model.safetensors").exists()


def test_ranks_may_have_nothing_but_zeros(tmp_path: Path) -> None:
    zeros = torch.zeros(40)
    convert(written(tmp_path / "step", zeros), tmp_path / "model.safetensors", family="deepspeed", fsync=False)
    assert_same(load_with_aliases(tmp_path / "model.safetensors"), {"w": zeros})
