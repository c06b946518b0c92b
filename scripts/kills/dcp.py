"""torch.distributed.checkpoint: two ranks save shards, at once or in the background."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_kills import FIRST, SECOND, THIRD, Saver

NEEDED = ("torch",)
NAMES = [f"layers.{number}.weight" for number in range(8)]


def prepare() -> None:
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401


def state_of(number: int) -> dict[str, Any]:
    """The state of a step: each rank has half of the rows, all of which are the number of the step."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    made = {
        name: distribute_tensor(torch.full((512, 1024), number + at / 8), mesh, [Shard(0)])
        for at, name in enumerate(NAMES)
    }
    return {"model": made, "step": number}


def started() -> None:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")


def train(run: Path, rank: int, begun: Callable[[], None], ended: Callable[[], None]) -> None:
    """Save all at once."""
    from torch.distributed.checkpoint.state_dict_saver import save

    started()
    for number in (FIRST, SECOND, THIRD):
        state = state_of(number)
        if number == THIRD:
            begun()
        save(state, checkpoint_id=run / f"step-{number}")
    ended()


def train_in_background(run: Path, rank: int, begun: Callable[[], None], ended: Callable[[], None]) -> None:
    """Save in the background."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    started()
    for number in (FIRST, SECOND, THIRD):
        state = state_of(number)
        if number == THIRD:
            begun()
        saving: Any = async_save(state, checkpoint_id=run / f"step-{number}")
        saving.result()
    ended()


def load(run: Path, step: Path, rank: int) -> None:
    """Load a step, and compare all of it."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load as load_state

    started()
    number = int(step.name.removeprefix("step-"))
    state, expected = state_of(0), state_of(number)
    load_state(state, checkpoint_id=step)
    for name in NAMES:
        assert torch.equal(state["model"][name].to_local(), expected["model"][name].to_local()), name


SAVERS = {"dcp": Saver(train, load, 2), "dcp-async": Saver(train_in_background, load, 2)}
