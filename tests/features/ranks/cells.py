"""What tests of the trunk, and of other features, ask of files of ranks too."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from dtensors import placed
from lone_files import STATE, Make, making
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .attacks import FILES
from .rank_files import CASES, RANKS, write

ATTACKS = FILES
# Checkpoints of this format, by name; and some that are equal to what torch makes of them.
DIRECTORIES = {f"ranks/{case}": RANKS / case / "checkpoint" for case in CASES}
EQUAL = [(RANKS / case / "checkpoint", RANKS / case / "expected.safetensors") for case in ("fsdp2_tp", "fsdp1_sharded")]

# One file of many, and what is to be named in its place; one that is whole, and one that may be.
_FLAT = {"modules": [{"handles": [{"flat_param.data": torch.zeros(6), "flat_param._fqns": ["w"]}], "name": ""}]}
PARTS: dict[str, tuple[Make, str]] = {
    "OLMo": (making(_FLAT, "model/rank0.pt"), "all ranks"),
    "flat parameters": (making({"l.0._flat_param": torch.zeros(6)}, "model.pt"), "all ranks"),
    "another rank": (making(STATE, "model_rank_3.pt"), "all ranks"),
}
WHOLE_FILES: dict[str, Make] = {"the only rank by its name": making(STATE, "model_world_size_1_rank_0.pt")}
MAYBE_WHOLE = [(making(STATE, "model_rank0.pt"), "the file does not record their number.")]


def _saved(place: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Save tensors in shards of rows, by two ranks."""

    def state(mesh: DeviceMesh, rank: int) -> dict[str, torch.Tensor]:
        return {name: placed(tensor, mesh, Shard(0)) for name, tensor in tensors.items()}

    return write(place, (2,), state)


SAVED_BY_RANKS = _saved


def _fuzz(chance: random.Random, place: Path) -> str:
    from features.ranks.fuzzing import fuzz_ranks

    return fuzz_ranks(chance, place)


FUZZED = {"ranks": _fuzz}
# A step of a run, by what writes it to a directory.
ONE_STEP: dict[str, Callable[[Path], Path]] = {
    f"a file for each rank, {case}": lambda step, case=case: Path(shutil.copytree(RANKS / case / "checkpoint", step))
    for case in CASES
}
