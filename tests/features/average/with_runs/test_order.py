"""The order of the steps of a run in a moving average."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_here

from ckptconv import average

pytestmark = pytest.mark.usefixtures("place")


def steps(*names: str) -> list[str]:
    """Files of these names, each with a tensor of its own."""
    for number, name in enumerate(names):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": torch.full((3,), float(number))}, name)
    return list(names)


@pytest.mark.parametrize(
    "pattern", ["step-{}.pt", "runs/7b/checkpoint-{}/model.pt", "model_{}.pt", "epoch=1-step={}.ckpt"]
)
def test_a_moving_average_of_steps_in_the_order_of_a_shell_is_refused(pattern: str) -> None:
    as_typed = steps(*(pattern.format(number) for number in (100, 80, 90)))
    in_order = [as_typed[1], as_typed[2], as_typed[0]]
    said = ckptconv_here("average", *as_typed, "out.safetensors", "--ema", 0.9, "--dry-run").refused(
        2, f"{as_typed[0]} was given before {as_typed[1]}", f"The order by number is {', '.join(in_order)}."
    )
    assert not Path("out.safetensors").exists(), said
    assert average(in_order, "out.safetensors", ema=0.9).averaged == in_order
    # The mean has no order, and weights of one's own go with any.
    assert average(as_typed, "out.safetensors").averaged == as_typed
    assert average(as_typed, "out.safetensors", weights=[0.1, 0.81, 0.09]).averaged == as_typed


@pytest.mark.parametrize(
    "names",
    [
        ("b/step-200.pt", "a/step-100.pt"),  # of two runs
        ("seed_2/step-100.pt", "seed_1/step-200.pt"),
        ("teacher.pt", "student.pt"),
        ("llama-7b.pt", "llama-3b.pt"),  # a size is no step
        ("step-80.pt", "step-80.pt", "step-90.pt"),
    ],
)
def test_other_checkpoints_are_taken_as_they_are_given(names: tuple[str, ...]) -> None:
    assert average(steps(*names), "out.safetensors", ema=0.5).averaged == list(names)
