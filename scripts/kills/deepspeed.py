"""DeepSpeed: two ranks of ZeRO-2 save a tag, and `latest` after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_kills import FIRST, SECOND, THIRD, Saver

NEEDED = ("torch", "deepspeed")


def prepare() -> None:
    import deepspeed  # noqa: F401


def engine_of() -> Any:
    import torch
    from test_deepspeed import started

    deepspeed = started()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    return engine


def train(run: Path, rank: int, begun: Callable[[], None], ended: Callable[[], None]) -> None:
    """Train and save three times."""
    import torch

    engine = engine_of()
    for number in (FIRST, SECOND, THIRD):
        engine.backward(engine(torch.ones(1, 512)).sum())
        engine.step()
        torch.distributed.barrier()
        if number == THIRD:
            begun()
        engine.save_checkpoint(str(run), tag=f"global_step{number}", client_state={"step": number})
    ended()


def load(run: Path, step: Path, rank: int) -> None:
    """Load a tag."""
    engine = engine_of()
    path, client = engine.load_checkpoint(str(run), tag=step.name)
    assert path is not None
    assert client["step"] == int(step.name.removeprefix("global_step"))


SAVERS = {"deepspeed": Saver(train, load, 2)}
