"""What tests of the trunk ask of sharded sets of torch.save too."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from checkpoints import a_torch_set
from remote import a_model

from . import attacks

_INDEX = "pytorch_model.bin.index.json"
_TWO = {"model.a": torch.arange(6.0).reshape(2, 3), "model.b": torch.tensor([1.0, -0.5])}
ATTACKS = attacks.DIRECTORIES
MAKERS = {"set": (lambda path: a_torch_set(_TWO, path), "in", "pt2safetensors")}


def _shards(place: Path) -> None:
    tree = a_model(layers=10)
    names = sorted(tree)
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    for number in (1, 2):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        part = {name: tree[name] for name in names[number - 1 :: 2]}
        torch.save(part, place / file)
        index["weight_map"] |= dict.fromkeys(part, file)
    (place / _INDEX).write_text(json.dumps(index))


TORCH_FILES = [
    (
        "pt/sharded",
        _shards,
        (
            ("pt2safetensors", _INDEX, "out", "--json"),
            ("inspect", _INDEX, "--json"),
            ("verify", _INDEX, "out", "--json"),
        ),
    )
]


def _fuzz(chance: random.Random, place: Path) -> str:
    from features.torch_shards.fuzzing import fuzz_index

    return fuzz_index(chance, place)


FUZZED = {"index": _fuzz}
