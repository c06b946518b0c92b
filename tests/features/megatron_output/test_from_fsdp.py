"""Steps of Megatron-FSDP become steps that Megatron-LM loads."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from cells import VERIFY
from checkpoints import assert_same, ckptconv_here, done
from features.megatron_core.fsdp_step import HIDDEN, joined, saved


def test_it_becomes_a_step_of_torch_dist_with_both_optimizers(tmp_path: Path) -> None:
    weights = joined(saved(tmp_path / "run"))
    step = tmp_path / "torch_dist/iter_0000007"
    done(ckptconv_here("convert", tmp_path / "run", step, "--to", "megatron", "--states", tmp_path / "run", *VERIFY))
    name = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    keys = [name, f"optimizer.state.exp_avg.{name}", f"optimizer.state.param.{name}"]
    tensors = {key: torch.empty(2, 12, HIDDEN) for key in keys}
    dcp.load(tensors, checkpoint_id=step, no_dist=True)
    experts = torch.stack([weights[f"decoder.layers.1.mlp.experts.linear_fc1.weight{number}"] for number in range(2)])
    assert_same(tensors, dict(zip(keys, (experts, experts * 2, experts), strict=True)))
    common = torch.load(step / "common.pt", weights_only=False)
    assert (common["iteration"], common["args"].num_layers, common["opt_param_scheduler"]) == (7, 2, {"max_lr": 0.5})
    groups = [common["optimizer"][number]["optimizer"]["param_groups"] for number in (0, 1)]
    assert {(group["wd_mult"], group["is_expert_parallel"], group["step"]) for group in groups[0]} == {
        (1.0, False, 7),
        (0.0, False, 7),
    }
    assert {(group["wd_mult"], group["is_expert_parallel"], group["step"]) for group in groups[1]} == {(1.0, True, 7)}
