"""Checkpoints of torch.distributed.checkpoint that are opened and loaded."""

from __future__ import annotations

from compare import assert_same as assert_same_trees
from features.dcp.cases import checkpoint_of

import ckptconv


def test_the_tree_is_nested_as_it_was_saved() -> None:
    with ckptconv.open(checkpoint_of("fsdp2_w2_nested")) as opened:
        assert set(opened.tree) == {"model", "optim"}
        assert set(opened.tree["model"]) == set(opened)


def test_the_metadata_is_loaded_with_all_that_it_describes() -> None:
    place = checkpoint_of("fsdp2_w2_nested")
    assert_same_trees(ckptconv.load_state_dict(place), ckptconv.load_state_dict(place / ".metadata"))
