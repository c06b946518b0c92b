"""Orbax: its manager saves a step under a temporary name, and renames it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_kills import FIRST, SECOND, THIRD, Saver

NEEDED = ("orbax", "jax")


def prepare() -> None:
    import jax
    import orbax.checkpoint

    assert jax.numpy
    assert orbax.checkpoint.CheckpointManager


def state_of(number: int) -> dict[str, Any]:
    import jax

    return {f"layer{at}": jax.numpy.full((512, 1024), number + at / 8) for at in range(8)}


def train(run: Path, rank: int, begun: Callable[[], None], ended: Callable[[], None], background: bool = False) -> None:
    """Save three steps."""
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=background)
    with ocp.CheckpointManager(run.absolute(), options=options) as manager:
        for number in (FIRST, SECOND, THIRD):
            state = state_of(number)
            if number == THIRD:
                begun()
            manager.save(number, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
        ended()


def load(run: Path, step: Path, rank: int) -> None:
    """Restore a step, and compare all of it."""
    import numpy as np
    import orbax.checkpoint as ocp

    number = int(step.name)
    expected = state_of(number)
    with ocp.CheckpointManager(run.absolute()) as manager:
        restored = manager.restore(number, args=ocp.args.StandardRestore(state_of(0)))
    for name, array in expected.items():
        assert np.array_equal(restored[name], array), name


SAVERS = {"orbax": Saver(train, load), "orbax-async": Saver(functools.partial(train, background=True), load)}
