"""Outputs that are computed, as features compute them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cells import of_features
from safetensors.torch import save_file

from ckptconv.result import Report

LAYER = "model.layers.{}.mlp.{}_proj.weight"
NAMES = [LAYER.format(number, part) for number in range(2) for part in ("gate", "up")]
ROWS, COLUMNS = 136, 160


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sources(here: Path) -> Path:
    """Put models `a`, `b`, `c`, adapters `lora` and `dora`, and what features make of them, into a directory."""
    for seed, name in enumerate(("a", "b", "c")):
        _model(here / name, 10 * seed)
    _adapter(here / "lora")
    _adapter(here / "dora", use_dora=True)
    for make in of_features("SOURCES"):
        make(here)
    return here


def _model(here: Path, seed: int) -> None:
    here.mkdir()
    weights = {name: random(ROWS, COLUMNS, seed=seed + at) for at, name in enumerate(NAMES)}
    save_file({name: each.bfloat16() for name, each in weights.items()}, here / "model.safetensors")
    (here / "config.json").write_text('{"dtype": "bfloat16"}')


def _adapter(here: Path, **told: Any) -> None:
    here.mkdir()
    tensors = {}
    for at, name in enumerate(NAMES):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = random(3, COLUMNS, seed=50 + at)
        tensors[f"{module}.lora_B.weight"] = random(ROWS, 3, seed=60 + at)
        if told:
            tensors[f"{module}.lora_magnitude_vector"] = random(ROWS, seed=70 + at).abs()
    save_file(tensors, here / "adapter_model.safetensors")
    (here / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6, **told}))


Job = Callable[..., Report]


# What makes an output, called with where `sources` are, the name of the one that verify is to be asked of, the output,
# and options.
JOBS: dict[str, tuple[Job, str]] = {name: job for jobs in of_features("JOBS") for name, job in jobs.items()}
# Of each kind one, and two of them in one.
SOME = [job for some in of_features("SOME") for job in some]
