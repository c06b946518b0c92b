"""torch_checkpointing: two ranks save a file each, and rank 0 renames the directory when both are done; or they save to
the directory itself, where nothing but `metadata.pkl` is written last."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_kills import FIRST, SECOND, THIRD, Saver

from kills.dcp import NAMES, started, state_of

NEEDED = ("torch", "torch_checkpointing")


def prepare() -> None:
    """Import what a saver needs. Its ranks tell each other their metadata on a GPU; here the backend does that."""
    for module in ("torch.distributed.tensor", "torch_checkpointing"):
        importlib.import_module(module)
    manager = importlib.import_module("torch_checkpointing.metadata_manager").DefaultMetadataManager
    manager._all_gather_pickled_data = _gathered


def _gathered(self: Any, data: Any, process_group: Any) -> dict[int, Any]:
    import torch

    ranks: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    torch.distributed.all_gather_object(ranks, data, group=process_group)
    return dict(enumerate(ranks))


def manager_of(in_place: bool) -> Any:
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_sync_save()
    # Some file systems open files for direct writes, and then refuse those that are not aligned.
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    config.items = {"model": ItemSpec(resharder=DefaultResharder())}
    config.save.writer_config.write_to_temp_dir = not in_place
    return CheckpointManager(config)


def train(run: Path, rank: int, begun: Callable[[], None], ended: Callable[[], None], in_place: bool = False) -> None:
    """Save three steps."""
    import torch

    started()
    manager = manager_of(in_place)
    for number in (FIRST, SECOND, THIRD):
        state = state_of(number)
        if number == THIRD:
            begun()
        manager.save(str(run / f"step-{number}"), state)
    ended()
    # The ranks meet at a store of rank 0: none goes while another waits there.
    torch.distributed.barrier()


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
