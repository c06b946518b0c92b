"""The entries of a model file that are neither of the model nor of its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.pickles.children import tensors_of

# Entries about the model, its optimizer and the ranks.
_OF_MODEL = {
    "module",
    "optimizer",
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "sparse_tensor_module_names",
    "csr_tensor_module_names",
    "ds_config",
    "ds_version",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
    "num_experts",
}


def left_of(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the entries of a client, and those of DeepSpeed about the training's progress, each with its tensors."""
    return {
        str(name): tensors_of(value)
        for name, value in values.items()
        if name not in _OF_MODEL and value is not None and not (isinstance(value, (dict, list)) and not value)
    }
