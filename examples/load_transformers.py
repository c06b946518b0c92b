"""Load a checkpoint of any format into a model of transformers, built on the meta device.

    python examples/load_transformers.py CONFIG_DIRECTORY CHECKPOINT

With `dispatched`, accelerate's load_checkpoint_and_dispatch loads the checkpoint: each tensor is read when it is placed
on its device or in the offload directory.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import modeling
from transformers import AutoConfig, AutoModelForCausalLM

import ckptconv


def loaded(config: Any, checkpoint: str, **options: Any) -> Any:
    """Return a model that uses the tensors of the checkpoint; `options` are those of `load_state_dict`."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(ckptconv.load_state_dict(checkpoint, **options), assign=True, strict=False)
    model.tie_weights()
    lacking = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if lacking:
        raise ValueError(f"{checkpoint} lacks {lacking}")
    return model.eval()


def dispatched(config: Any, checkpoint: str, **options: Any) -> Any:
    """Return a model that accelerate has loaded and placed; `options` are those of `load_checkpoint_and_dispatch`.

    It reads an index, and calls `load_state_dict` for each listed file: here a single one, for the whole checkpoint.
    """
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    with tempfile.TemporaryDirectory() as place, ckptconv.open(checkpoint) as tensors:
        index = Path(place, "model.safetensors.index.json")
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "checkpoint")}))
        with mock.patch.object(modeling, "load_state_dict", return_value=Read(tensors)):
            model = load_checkpoint_and_dispatch(model, index, **{"device_map": "auto", **options})
    return model.eval()


class Read(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint, each read when it is accessed."""

    def __init__(self, tensors: ckptconv.Checkpoint) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].torch()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def main() -> None:
    directory, checkpoint = sys.argv[1:]
    model = loaded(AutoConfig.from_pretrained(directory), checkpoint)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters of {type(model).__name__}")


if __name__ == "__main__":
    main()
