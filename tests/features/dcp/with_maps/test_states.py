"""States of an optimizer, converted by a map."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cells import VERIFIED
from features.dcp.cases import checkpoint_of
from safetensors.torch import load_file

from ckptconv import convert
from ckptconv.outputs.kinds import NAMED

OF_STATES = """
[keep]
a = ["l1.bias", "l2.*", "one.*", "head.*", "frozen.*", "mask", "scale0d", "bn.running_*", "bn.num_*"]
b = ["l1.bias", "l2.*", "one.*", "head.*", "frozen.*", "mask", "scale0d", "bn.running_*", "bn.num_*"]
[[rule]]
a = "emb.weight : (low + high) h"
b = ["emb.low : low h", "emb.high : high h"]
[[rule]]
a = ["bn.weight : f", "bn.bias : f"]
b = "bn.both : (f + f)"
[[rule]]
a = "l1.weight : o i"
b = "l1.w : i o"
"""


def test_states_of_an_optimizer_go_with_their_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("states.toml").write_text(OF_STATES)
    source = checkpoint_of("fsdp2_w2_nested")
    convert(source, "plain.safetensors", optimizer="plain-states.safetensors")
    done = {"map": "states.toml", "size": {"low": 3}, **VERIFIED}
    convert(source, "mapped.safetensors", optimizer="states.safetensors", manifest="m.json", **done)
    before, after = load_file("plain-states.safetensors"), load_file("states.safetensors")
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(after[f"emb.low.{key}"], before[f"emb.weight.{key}"][:3])
        assert torch.equal(after[f"emb.high.{key}"], before[f"emb.weight.{key}"][3:])
        assert torch.equal(after[f"l1.w.{key}"], before[f"l1.weight.{key}"].T)
        assert torch.equal(
            after[f"bn.both.{key}"], torch.cat([before[f"bn.{each}.{key}"] for each in ("weight", "bias")])
        )
    assert after["emb.low.step"] == after["emb.high.step"] == before["emb.weight.step"]
    if "pt" not in NAMED:
        return
    convert("plain-states.safetensors", "plain.pt")
    convert("states.safetensors", "back.pt", **VERIFIED)
    plain, back = torch.load("plain.pt"), torch.load("back.pt")
    assert plain["state"].keys() == back["state"].keys()
    for name, state in plain["state"].items():
        assert back["state"][name].keys() == state.keys()
        assert all(torch.equal(back["state"][name][key], tensor) for key, tensor in state.items()), name
    assert [sorted(group["params"]) for group in back["param_groups"]] == [
        sorted(group["params"]) for group in plain["param_groups"]
    ]
