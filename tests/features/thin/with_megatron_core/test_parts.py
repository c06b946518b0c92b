"""Values in the common file of Megatron-core that a reduced step would lack."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from features.megatron_core.test_megatron import unpacked
from features.thin.reduced import kept, reduced


@pytest.mark.parametrize("is_weight", [True, False])
def test_values_that_no_record_keeps_are_named_and_weights_keep_the_step(is_weight: bool, tmp_path: Path) -> None:
    (saved,) = unpacked("reshardable_tp2_dp2", tmp_path / "files").glob("iter_*")
    common = torch.load(saved / "common.pt", weights_only=False)
    more = {"ema": torch.ones(4, 4)} if is_weight else {"rng": torch.get_rng_state()}
    torch.save({**common, **more}, saved / "common.pt")
    for number in (1, 2):
        shutil.copytree(saved, tmp_path / "run" / f"iter_000000{number}")
    plan = reduced(tmp_path / "run")
    if is_weight:
        assert plan == kept("ema")
    else:
        assert plan["lost"] == ["rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2", "rng"]
