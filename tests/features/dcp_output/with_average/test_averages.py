"""Averages of checkpoints of several formats, one of them of torch.distributed.checkpoint."""

from __future__ import annotations

import pytest
import torch
from cells import VERIFIED, verify, verifying
from checkpoints import ZERO
from safetensors.torch import load_file

from ckptconv import average, convert

pytestmark = pytest.mark.usefixtures("place")


@verifying
def test_formats_may_be_mixed() -> None:
    zero = ZERO / "z3_fp32_w4" / "checkpoint"
    convert(zero, "model.safetensors")
    other = {name: tensor + 1 for name, tensor in load_file("model.safetensors").items() if tensor.is_floating_point()}
    torch.save({**load_file("model.safetensors"), **other}, "other.pt")
    convert("other.pt", "step", to="dcp")
    average(["other.pt", zero, "step", zero, "model.safetensors"], "out", **VERIFIED)
    found, first = load_file("out/model.safetensors"), load_file("model.safetensors")
    for name in other:
        torch.testing.assert_close(found[name], first[name] + 0.4)
    assert verify("model.safetensors", "out").bytes_compared
