"""Several inputs become checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ckptconv_here, done
from safetensors.torch import save_file


def test_checkpoints_for_training_are_made_of_several_inputs(place: Path) -> None:
    torch.save({"s": {"x": torch.ones(3), "y": torch.zeros(2, 2)}, "epoch": 3}, "a.pt")
    save_file({"w": torch.ones(3)}, "b.safetensors")
    several = ["convert", "a.pt", "b.safetensors", "--output-dir", "o", "--to", "dcp"]
    ckptconv_here(*several, "--states", "a.pt").refused(2, "--states applies to one conversion")
    done(ckptconv_here(*several))
    assert {path.parent.name for path in (place / "o").rglob("*.metadata")} == {"a", "b"}


def test_the_step_that_was_taken_of_a_run_is_told_with_how_to_convert_every_step(place: Path) -> None:
    for number in (100, 200):
        torch.save({"w": torch.full((3,), float(number))}, "a.pt")
        done(ckptconv_here("convert", "--to", "dcp", "a.pt", f"run/step-{number}"))
    of_run = done(ckptconv_here("convert", "run", "--output-dir", "o")).out
    every_step = "To convert every step, use run/step-* as inputs."
    assert f"run: Took step-200, the last of 2 steps. {every_step}" in of_run.splitlines()
    steps = sorted(str(path) for path in Path().glob("run/step-*"))
    assert "Took" not in done(ckptconv_here("convert", *steps, "--output-dir", "o")).out
    assert sorted(path.name for path in (place / "o").iterdir()) == ["run", "step-100", "step-200"]
