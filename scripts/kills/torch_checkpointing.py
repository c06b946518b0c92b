"""torch_checkpointing: two ranks save a file each, and rank 0 renames the directory when both are done; or they save to
the directory itself, where nothing but `metadata.pkl` is written last."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_kills import FIRST, SECOND, THIRD, Saver

from kills.dcp import NAMES, started, state_of

NEEDED = ("torch", "torch_checkpointing")


def prepare() -> None:
    import torch.distributed.tensor  # noqa: F401
    import torch_checkpointing

    assert torch_checkpointing.CheckpointManager


def manager_of(in_place: bool) -> Any:
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.default_resharder import DefaultResharder

    config = CheckpointManager.Config.with_sync_save()
    config.items = {"model": ItemSpec(resharder=DefaultResharder())}
    config.save.writer_config.write_to_temp_dir = not in_place
    return CheckpointManager(config)


def train(run: Path, rank: int, begun: Callable[[], None], ended: Callable[[], None], in_place: bool = False) -> None:
    """Save three steps."""
    started()
    manager = manager_of(in_place)
    for number in (FIRST, SECOND, THIRD):
        state = state_of(number)
        if number == THIRD:
            begun()
        manager.save(str(run / f"step-{number}"), state)
    ended()


def load(run: Path, step: Path, rank: int) -> None:
    """Load a step, and compare all of it."""
    import torch

    started()
    number = int(step.name.removeprefix("step-"))
    expected = state_of(number)["model"]
    found = manager_of(False).load(str(step), {"model": state_of(0)["model"]}, strict=True)["model"]
    for name in NAMES:
        assert torch.equal(found[name].to_local(), expected[name].to_local()), name


SAVERS = {
    "torch_checkpointing": Saver(train, load, 2),
    "torch_checkpointing-in-place": Saver(functools.partial(train, in_place=True), load, 2),
}
