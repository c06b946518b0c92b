"""Megatron-core's checkpoints, written as checkpoints of torch.distributed.checkpoint again."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch.distributed.checkpoint as dcp
from checkpoints import ckptconv_here
from effort import every
from features.megatron_core.cases import unpacked

from ckptconv.formats.detect import open_source


@every("case", ["reshardable_tp2_dp2", "hashed_tp2_dp2"])
def test_on_the_way_back_values_have_the_keys_under_which_its_loader_looks_for_them(case: str, tmp_path: Path) -> None:
    checkpoint = unpacked(case, tmp_path)
    objects = {*open_source(checkpoint).weights["objects"], "common_state/shard_0_1"}
    assert ckptconv_here("dcp2safetensors", checkpoint, tmp_path / "model").code == 0
    assert ckptconv_here("safetensors2dcp", tmp_path / "model", tmp_path / "back").code == 0
    after = set(pickle.loads((tmp_path / "back" / ".metadata").read_bytes()).state_dict_metadata)
    assert objects
    assert objects <= after
    assert not [key for key in after if key.startswith(("objects.", "common."))]
    # As `dist_checkpointing.load_common_state_dict` reads it.
    state = {"common_state/shard_0_1": io.BytesIO()}
    dcp.load(state, checkpoint_id=tmp_path / "back", no_dist=True)
    (common,) = state["common_state/shard_0_1"]
    assert common["iteration"] == 20
    assert common["args"]["data_path"] == ["a", "b"]
