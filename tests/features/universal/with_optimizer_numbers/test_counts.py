"""The step count of states that count none."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ckptconv_here, done


def test_states_that_count_no_steps_are_not_said_to_continue_at_one(place: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place / "t.pt")
    report = done(ckptconv_here("convert", "t.pt", "u", "--to", "universal")).out
    assert "which record no steps: its step count starts at 0" in report
    assert "continues" not in report
