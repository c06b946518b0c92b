"""Checkpoints of Megatron-FSDP as outputs: what torch's own reader finds in them, and what is refused.

`make test-megatron` has Megatron-FSDP load them.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cells import VERIFY
from checkpoints import assert_same, ckptconv_here, done
from features.megatron_core.test_megatron import archive, one_for_each_layer, unpacked
from safetensors.torch import save_file

WORDS = ("--to", "megatron-fsdp", "--no-fsync", "--quiet")


def found(step: Path) -> dict[str, Any]:
    """What torch's own reader finds in a checkpoint."""
    described = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(saved.size, dtype=saved.properties.dtype) if hasattr(saved, "size") else None
        for name, saved in described.items()
    }
    dcp.load(state, checkpoint_id=step, no_dist=True)
    return state


def gate_and_up(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    divided = {}
    for name, tensor in tensors.items():
        if name.endswith("linear_fc1.weight"):
            divided |= dict(zip((f"{name}_w", f"{name}_v"), tensor.chunk(2), strict=True))
        else:
            divided[name] = tensor
    return divided


def test_a_step_of_torch_dist_becomes_what_megatron_fsdp_asks_for(tmp_path: Path) -> None:
    held = archive("reshardable_tp2_dp2")[1]
    run, step = unpacked("reshardable_tp2_dp2", tmp_path), tmp_path / "fsdp/iter_0000020"
    done(ckptconv_here("convert", run, step, *WORDS, "--states", run, "--chunks", "2", *VERIFY))
    assert (tmp_path / "fsdp/latest_checkpointed_iteration.txt").read_text() == "20"
    assert not (step / "common.pt").exists()
    assert not (step / "metadata.json").exists()
    state = found(step)
    masters = one_for_each_layer(held["masters"])
    # The weights are the masters.
    weights = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
    assert_same(weights, {f"model.module.{name}": tensor for name, tensor in gate_and_up(masters).items()})
    wrapped = "module.module.module."
    for key in ("exp_avg_sq", "exp_avg"):
        every = {
            name.removesuffix(f".{key}"): moment for name, moment in held["states"].items() if name.endswith(f".{key}")
        }
        for name, moment in gate_and_up(one_for_each_layer(every)).items():
            assert torch.equal(state[f"optimizer.state.{wrapped}{name}.{key}"], moment), name
            assert state[f"optimizer.state.{wrapped}{name}.step"].item() == 2.0
    # A parameter has its settings as a whole, with what the Adam of torch and of Transformer Engine look for.
    for name, master in masters.items():
        group = f"optimizer.param_to_group_meta.{wrapped}{name}"
        assert (state[f"{group}.step"], state[f"{group}.wd_mult"]) == (2.0, float(master.dim() > 1)), name
        assert (state[f"{group}.bias_correction"], state[f"{group}.default_config"]) == (True, True)
    assert isinstance(state["args"], Namespace)
    assert (state["args"].ckpt_format, state["args"].num_layers) == ("fsdp_dtensor", 2)
    assert (state["iteration"], state["checkpoint_version"]) == (20, 3.0)
    assert state["opt_param_scheduler.lr_decay_style"] == "cosine"


def test_experts_have_tensors_and_settings_of_their_own_and_come_back(tmp_path: Path) -> None:
    held = archive("moe_ep2_chained")[1]
    run, step = unpacked("moe_ep2_chained", tmp_path), tmp_path / "fsdp/iter_0000020"
    done(ckptconv_here("convert", run, step, *WORDS, "--states", run))
    state = found(step)
    name = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    for layer, experts in enumerate(held["masters"][name]):
        for number, expert in enumerate(experts):
            key = f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight{number}"
            parts = [state[f"model.module.{key}_{part}"] for part in "wv"]
            assert torch.equal(torch.cat(parts), expert)
            assert state[f"optimizer.param_to_group_meta.module.module.module.{key}.is_expert_parallel"] is True
    router = "optimizer.param_to_group_meta.module.module.module.decoder.layers.0.mlp.router.weight"
    assert state[f"{router}.is_expert_parallel"] is False
    there, back = tmp_path / "there/iter_0000020", tmp_path / "back/iter_0000020"
    for source, output in ((run, there), (step.parent, back)):
        words = ("convert", source, output, "--to", "megatron", "--states", source, "--no-fsync", "--quiet")
        done(ckptconv_here(*words, *(("--master",) if source == run else ())))
    first, second = found(there), found(back)
    assert_same(
        {key: of for key, of in second.items() if isinstance(of, torch.Tensor)},
        {key: of for key, of in first.items() if isinstance(of, torch.Tensor)},
    )
    args = torch.load(back / "common.pt", weights_only=False)["args"]
    assert args.ckpt_format == "torch_dist"


def test_weights_alone_keep_their_dtype(tmp_path: Path) -> None:
    held = archive("float16_pp2")[1]
    run = unpacked("float16_pp2", tmp_path)
    done(ckptconv_here("convert", run, tmp_path / "fsdp", *WORDS))
    state = found(tmp_path / "fsdp/release")
    expected = gate_and_up(one_for_each_layer(held["model"]))
    tensors = {name: of for name, of in state.items() if isinstance(of, torch.Tensor)}
    assert_same(tensors, {f"model.module.{name}": tensor for name, tensor in expected.items()})


@pytest.mark.parametrize("rows", [(12, 7), (12, 4)])
def test_a_matrix_that_may_have_a_gate_or_none_is_refused(rows: tuple[int, int], tmp_path: Path) -> None:
    first, second = rows
    weights = {
        "decoder.layers.0.mlp.linear_fc1.weight": torch.ones(first, 8),
        "decoder.layers.0.mlp.linear_fc2.weight": torch.ones(8, second),
    }
    save_file(weights, tmp_path / "model.safetensors")
    run = ckptconv_here("convert", tmp_path / "model.safetensors", tmp_path / "run", *WORDS)
    assert (run.code, "does not determine whether it has a gate" in run.err) == (5, True)


def test_groups_of_which_several_can_be_that_of_a_parameter_are_refused(tmp_path: Path) -> None:
    run = unpacked("reshardable_tp2_dp2", tmp_path)
    path = run / "iter_0000020/common.pt"
    common = torch.load(path, weights_only=False)
    groups = common["optimizer"]["optimizer"]["param_groups"]
    groups.append({**groups[0], "lr_mult": 0.5})
    torch.save(common, path)
    refused = ckptconv_here("convert", run, tmp_path / "fsdp/iter_0000020", *WORDS, "--states", run)
    assert (refused.code, "2 groups of the optimizer can contain" in refused.err) == (5, True)
    assert not (tmp_path / "fsdp").exists()
