"""Names of a checkpoint in a directory, of any program: weights, training steps, adapters, pointers to a step.

The entries are not read: their names alone decide whether an output may be written next to them.
"""

from __future__ import annotations

import re
from importlib import import_module

from ckptconv.formats import model_files
from ckptconv.formats.registered import DESCRIBING, FOREIGN, PIPELINES
from ckptconv.formats.run_names import MEGATRON_RANK, POINTERS, STEP_METADATA, ZERO, is_of_step
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename

# Weights of other programs: llama.cpp's, Keras', Flax's, onnx's, MLX's, Paddle's, diffusers', tensorizer's.
_OTHER_SUFFIXES = (".gguf", ".h5", ".keras", ".msgpack", ".onnx", ".npz", ".pdparams", ".dduf", ".tensors")
_ADAPTER = re.compile(r"adapter_(?:config\.json|model\..*)")
# Files of torch.distributed.checkpoint.
_DISTRIBUTED = re.compile(r".*\.distcp|(?:__\d{1,9})?\.metadata", re.DOTALL)
# Files that trainers save next to the weights: arguments, random states, schedulers.
_BESIDE = re.compile(
    r"(?:training_args|meta|scheduler|sampler|dl_state_dict|scaler|rng_state|random_states)(?:_\d+)*\.\w+"
)
_RANK = re.compile(rf"{MEGATRON_RANK}|{ZERO}")
# The most levels between the directory with a step and the step's weights: iter_0000100/mp_rank_00/model_optim_rng.pt.
_LEVELS = 3


def is_of_checkpoint(place: Location, name: str, levels: int = _LEVELS) -> bool:
    """Return whether the entry `name` of the directory `place` is weights, a step or an adapter, or names a step."""
    if place.names[name].kind != "directory":
        return _is_file_of_weights(name)
    # Folders of parameters in a universal checkpoint's `zero`, and of models in a pipeline, have any name.
    is_part = basename(place.path) == ZERO or any(sign in place.names for sign in PIPELINES)
    if not levels or not (is_part or is_of_step(name) or _RANK.fullmatch(name) or name.endswith(".ckpt")):
        return False
    inner = place.child(name)
    return any(is_of_checkpoint(inner, inner_name, levels - 1) for inner_name in inner.names)


def is_read_with_others(name: str) -> bool:
    """Return whether programs that read a directory of safetensors or a step also read its checkpoint `name`."""
    beside = (*TORCH_SUFFIXES, *_OTHER_SUFFIXES)
    return bool(_ADAPTER.fullmatch(name)) or not (name.endswith(beside) or model_files.is_torch_index(name))


def is_distributed(name: str) -> bool:
    """Return whether a file belongs to torch.distributed.checkpoint, whose directories hold nothing else."""
    return _DISTRIBUTED.fullmatch(name) is not None


def _is_file_of_weights(name: str) -> bool:
    if _BESIDE.fullmatch(name):
        return False
    suffixes = (model_files.SUFFIX, model_files.INDEX, *DESCRIBING, *TORCH_SUFFIXES, *_OTHER_SUFFIXES)
    known = name.endswith(suffixes) or name in POINTERS or name == STEP_METADATA
    known = known or is_distributed(name) or bool(_ADAPTER.fullmatch(name))
    return known or any(import_module(module).is_sign(name) for module in FOREIGN)
