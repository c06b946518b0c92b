"""The states of ZeRO-0, which numbers its parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from effort import every
from features.deepspeed.test_layouts import check, check_model, dense
from features.deepspeed.zero_writer import Model, Save, expected, expected_states, values, write


def test_optimizer_states_of_zero_0_are_named_where_their_order_is_known(tmp_path: Path) -> None:
    model = Model([{n: t.bfloat16().float() for n, t in dense().trained.items()}], tied=dense().tied)
    check_model(tmp_path, model, Save(stage=0, dtype=torch.float32))
    halves = [dict(list(model.trained.items())[::2]), dict(list(model.trained.items())[1::2])]
    two = replace(model, groups=halves)
    checkpoint = write(tmp_path / "two", two, Save(stage=0, dtype=torch.float32))
    assert not check(tmp_path, checkpoint, expected(model, torch.float32), expected_states(two))
    # Either group may have either of these.
    alike = Model([{"a": values(3, seed=1)}, {"b": values(3, seed=2)}])
    checkpoint = write(tmp_path / "alike", alike, Save(stage=0, dtype=torch.float32))
    (warning,) = check(tmp_path, checkpoint, expected(alike, torch.float32))
    assert "the parameter names are not known" in warning


@every("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_states_of_other_precisions_are_named(dtype: torch.dtype, tmp_path: Path) -> None:
    model = dense()
    model.groups = [{name: tensor.to(dtype).float() for name, tensor in model.trained.items()}]
    check_model(tmp_path, model, Save(stage=0, dtype=dtype))
