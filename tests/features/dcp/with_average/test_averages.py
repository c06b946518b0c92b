"""Averages of checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import assert_same, load_with_aliases
from features.dcp.cases import checkpoint_of

from ckptconv import average, convert

pytestmark = pytest.mark.usefixtures("place")


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
