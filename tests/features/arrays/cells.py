"""What tests of the trunk and of other features ask of checkpoints in programs too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import assert_same
from features.arrays.reading import assert_reads

import ckptconv
from ckptconv.features.arrays.loading_options import LOADING
from ckptconv.options.table import OPTIONS

# What opens a checkpoint, and what loads its state.
READER = ckptconv.open
LOADER = ckptconv.load_state_dict


def reads(path: Any, expected: Mapping[str, torch.Tensor]) -> None:
    """Every way to read the checkpoint gives the tensors that are expected."""
    with ckptconv.open(path) as checkpoint:
        assert_reads(checkpoint, expected)
    state = ckptconv.load_state_dict(path)
    assert_same({name: value for name, value in state.items() if isinstance(value, torch.Tensor)}, dict(expected))


# Calls that read a checkpoint whole: its tensors, its tree, its state.
READ_WHOLE: list[Callable[[Any], object]] = [
    lambda path: ckptconv.open(path).get_tensors(),
    lambda path: ckptconv.open(path).tree,
    ckptconv.load_state_dict,
]


def read_all(path: Path, briefly: bool) -> None:
    """Read, slice, walk and load a checkpoint; `briefly`: but for loading it."""
    with ckptconv.open(path) as checkpoint:
        tree = checkpoint.tree
        list(tree) if isinstance(tree, (Mapping, Sequence)) else tree
        for tensor in itertools.islice(checkpoint.values(), 1000):
            tensor[tuple(slice(1, 3) for _ in tensor.shape)]
        checkpoint.get_tensors()
    if not briefly:
        ckptconv.load_state_dict(path)


# Options that a call does not know, or of wrong values.
CALLS: dict[str, Callable[..., Any]] = {
    "open": lambda **options: ckptconv.open("none.pt", **options),
    "load_state_dict": lambda **options: ckptconv.load_state_dict("none.pt", **options),
}
MISSPELT = [
    ("open", "exclude_frozn", "exclude_frozen"),
    ("load_state_dict", "keys", "key"),
    ("open", "framwork", "framework"),
]
# Options of other programs, and the advice.
ADVISED = [
    *(
        [("open", "step", "Give the directory of the step; for a DeepSpeed run, use tag TAG.")]
        if "last_good" in OPTIONS
        else []
    ),
    ("open", "map_location", "Use device."),
    ("load_state_dict", "map_location", "Use device."),
    # Advice that names what the call does not have is none.
    (
        "load_state_dict",
        "num_workers",
        f"load_state_dict has {', '.join(sorted(['device', 'path', *LOADING]))}.",
    ),
]
WRONG_VALUES: list[tuple[str, str, Any]] = [
    ("open", "inert", 1),
    ("open", "exclude_frozen", "yes"),
    ("open", "model_rank", "first"),
    ("open", "storage_options", "{"),
    ("load_state_dict", "key", 3),
    ("load_state_dict", "storage_options", []),
    ("load_state_dict", "dtype", "int4"),
]
# What a call does with a value in the place of a path, and with others.
PATHS: dict[str, Callable[[Any], object]] = {"open": ckptconv.open, "load_state_dict": ckptconv.load_state_dict}
OTHER_VALUES: dict[str, tuple[Callable[[Any], object], Any, str]] = {
    "device": (
        lambda value: ckptconv.load_state_dict("model.pt", device=value),
        "no:thing",
        "'no:thing' is not a device",
    ),
    "framework": (lambda value: ckptconv.open("model.pt", framework=value), ["np"], "The framework ['np']"),
    "raw": (lambda value: ckptconv.open("model.pt")["weight"].numpy(raw=value), [], "neither True nor False"),
}
# Calls that open a checkpoint.
OPENING: list[Callable[[Any], object]] = [ckptconv.open, ckptconv.load_state_dict]
