"""The whole corpus, by name: what is here, and what features add to it as `ATTACKS` in their cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cells import of_features
from safetensors.torch import load_file

from .assemble import VALUES
from .corpus import CASES, Case
from .directories import DIRECTORIES, Directory
from .headers import FILES, SETS
from .readers import READERS

_ADDED = [case for added in of_features("ATTACKS") for case in added]
ALL: list[Case] = [
    *CASES.values(), *READERS.values(), *FILES.values(), *(case for case in _ADDED if isinstance(case, Case)),
]  # fmt: skip
ALL_DIRECTORIES: list[Directory] = [
    *DIRECTORIES.values(), *SETS.values(), *(case for case in _ADDED if isinstance(case, Directory)),
]  # fmt: skip
# The files that torch.load would have make the canary, and the tensor "w" of those that are whole.
LIVE = [case for case in CASES.values() if case.live]
W = torch.tensor(VALUES).reshape(2, 3)


def written(case: Case, directory: Path) -> Path:
    path = directory / case.file
    path.write_bytes(case.make(str(directory / "canary")))
    return path


def loaded(output: Path) -> Any:
    """What an output holds, read as carelessly as can be."""
    return torch.load(output, weights_only=False) if output.suffix == ".pt" else load_file(output)
