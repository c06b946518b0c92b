"""Averages of checkpoints of torch.distributed.checkpoint, and those beside other formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import ZERO, assert_same, load_with_aliases
from features.dcp.cases import checkpoint_of
from safetensors.torch import load_file

from ckptconv import average, convert, verify

pytestmark = pytest.mark.usefixtures("place")


def test_formats_may_be_mixed() -> None:
    zero = ZERO / "z3_fp32_w4" / "checkpoint"
    convert(zero, "model.safetensors")
    other = {name: tensor + 1 for name, tensor in load_file("model.safetensors").items() if tensor.is_floating_point()}
    torch.save({**load_file("model.safetensors"), **other}, "other.pt")
    convert("other.pt", "step", to="dcp")
    average(["other.pt", zero, "step", zero, "model.safetensors"], "out", verify=True)
    found, first = load_file("out/model.safetensors"), load_file("model.safetensors")
    for name in other:
        torch.testing.assert_close(found[name], first[name] + 0.4)
    assert verify("model.safetensors", "out").bytes_compared


def test_an_fsdp_checkpoint_averaged_with_itself_is_itself() -> None:
    step = checkpoint_of("hsdp_2x2")
    convert(step, "once.safetensors")
    average([step, step], "twice.safetensors")
    assert_same(load_with_aliases(Path("once.safetensors")), load_with_aliases(Path("twice.safetensors")))


def test_notes_on_states_give_no_option_that_there_is_not() -> None:
    step = checkpoint_of("fsdp2_w4_bf16")
    report = average([step, step], "out")
    assert any("Not converted" in note for note in report.notes)
    assert not any("--optimizer" in note for note in report.notes)
    assert any("--optimizer" in note for note in convert(step, "alone").notes)
