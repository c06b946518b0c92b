"""Deltas of checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import pytest
from features.dcp.cases import checkpoint_of

from ckptconv import diff, patch

pytestmark = pytest.mark.usefixtures("place")


def test_a_patch_of_the_weights_names_the_options_that_patch_the_rest_too() -> None:
    step = checkpoint_of("fsdp2_w4_bf16")
    for key in ("", "."):
        diff(step, step, key=key, delta=f"delta{key}")
        notes = " ".join(patch(step, f"delta{key}", f"out{key}", key=key).notes)
        assert ("Give --key . to both diff --delta and patch for everything." in notes) == (not key)
        assert "--optimizer" not in notes
