"""What tests of the trunk ask of saving too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ckptconv

_STATE = {"w": torch.ones(2)}
# Options that a call does not know, or of wrong values.
CALLS: dict[str, Callable[..., Any]] = {
    "save_state_dict": lambda **options: ckptconv.save_state_dict({}, "x.safetensors", **options)
}
MISSPELT = [("save_state_dict", "metdata", "metadata")]
WRONG_VALUES: list[tuple[str, str, Any]] = [("save_state_dict", "max_shard_size", "many")]
# What a call does with a value in the place of a path.
PATHS: dict[str, Callable[[Any], object]] = {"save_state_dict": lambda value: ckptconv.save_state_dict(_STATE, value)}
# Calls that would replace files of others.
WRITING: list[Callable[[], object]] = [
    lambda: ckptconv.save_state_dict(_STATE, "hf"),
    lambda: ckptconv.save_state_dict(_STATE, "new", manifest="a.pt"),
]
# Calls that move bytes, and show their progress: with a model, a directory, and a bar.
MOVING: list[Callable[[Any, Any, Any], object]] = [
    lambda model, here, bar: ckptconv.save_state_dict({"w": torch.zeros(1000)}, here / "saved", progress=bar)
]
