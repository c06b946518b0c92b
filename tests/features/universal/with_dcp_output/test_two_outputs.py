"""A universal checkpoint of weights and optimizer states in two outputs: the refusal names two commands, which work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFY
from checkpoints import ckptconv_here, done, torch_file
from optimizer_files import by_names


def training() -> dict[str, Any]:
    """A model that has trained for a step, and its optimizer."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    (states,) = by_names(model, optimizer)
    return {"model": model.state_dict(), "optimizer": states}


def test_states_in_another_output_come_by_way_of_a_distributed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = training()
    done(ckptconv_here("convert", torch_file(tmp_path, trained), "w", "--key", "model", "--optimizer", "st"))
    refused = ckptconv_here("convert", "w", "uni/step", "--to", "universal", "--states", "st")
    refused.refused(2, "to such a checkpoint with --to dcp and --states", "with --to universal")
    assert not Path("uni").exists()
    done(ckptconv_here("convert", "w", "both", "--to", "dcp", "--states", "st"))
    done(ckptconv_here("convert", "both", "uni/step", "--to", "universal", *VERIFY))
    for name in ("weight", "bias"):
        for state in ("exp_avg", "exp_avg_sq"):
            stored = torch.load(f"uni/step/zero/{name}/{state}.pt", weights_only=False)["param"]
            assert torch.equal(stored, trained["optimizer"]["state"][name][state])
