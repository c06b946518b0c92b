"""Files of a DeepSpeed run and of universal checkpoints that are one of many, and what to name in their place.

Source: DeepSpeed's runtime/engine.py and checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.features.deepspeed.locate import identity
from ckptconv.formats.alone import LoneKind, listed
from ckptconv.formats.lone_file import LoneFile
from ckptconv.formats.run_names import COMMON, WEIGHTS, ZERO
from ckptconv.tensors.lazy import LazyTensor

# Keys of an optimizer under which a rank's part of the master weights is, and keys of model files.
_PARTITIONS = frozenset({"single_partition_of_fp32_groups", "fp32_flat_groups"})
_OF_DEEPSPEED = frozenset({"ds_version", "dp_world_size", "mp_world_size"})
_UNIVERSAL = (WEIGHTS, "exp_avg.pt", "exp_avg_sq.pt")


def _of_deepspeed(file: LoneFile) -> bool:
    kind, numbers = identity(file.place.name) or ("", ())
    states = file.get("optimizer_state_dict")
    if kind not in ("", "model") or (isinstance(states, Mapping) and not _PARTITIONS.isdisjoint(states)):
        return True
    if not _is_model_file(file):
        return any(numbers) or (kind == "model" and file.place.name.startswith("zero"))
    ranks, module = file.get("mp_world_size"), file.get("module")
    if not isinstance(module, Mapping) or file.get("num_experts") or (type(ranks) is int and ranks > 1):
        return True  # a stage of a pipeline; without its experts; of a tensor-parallel rank
    return _has_placeholders(file, module)


def _has_placeholders(file: LoneFile, module: Mapping[Any, Any]) -> bool:
    """Return whether the model's state dict has empty tensors for parameters with elements: ZeRO-3 partitions these."""
    shapes = dict(_shapes(file))
    if shapes:
        return any(_is_empty(module.get(name)) and math.prod(shape) for name, shape in shapes.items())
    # Of releases before 0.6.0, the optimizer's file has the shapes.
    buffers = file.get("buffer_names") or ()
    parameters = [value for name, value in module.items() if name not in buffers]
    return bool(parameters) and all(map(_is_empty, parameters))


def _is_model_file(file: LoneFile) -> bool:
    return isinstance(file.tree, Mapping) and "module" in file.tree and not _OF_DEEPSPEED.isdisjoint(file.tree)


def _shapes(file: LoneFile) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shapes of parameters that the optimizer has."""
    groups = file.get("param_shapes")
    for group in groups if isinstance(groups, list) else [groups]:
        for name, shape in group.items() if isinstance(group, Mapping) else ():
            if isinstance(shape, tuple) and all(type(extent) is int for extent in shape):
                yield name, shape


def _is_empty(value: Any) -> bool:
    return isinstance(value, LazyTensor) and value.numel == 0


def _of_zero_1(file: LoneFile) -> bool:
    return _is_model_file(file) and file.get("optimizer") is None and any(_shapes(file))


def _of_universal(file: LoneFile) -> bool:
    place = file.place
    is_parameter = place.parent.parent.name == ZERO and (place.name in _UNIVERSAL or WEIGHTS in listed(place.parent))
    return is_parameter or (place.name in _UNIVERSAL and isinstance(file.get("param"), LazyTensor))


def _of_universal_optimizer(file: LoneFile) -> bool:
    return file.place.name == COMMON and file.place.parent.name == ZERO


LONE = (
    LoneKind(
        "belongs to one rank, stage, layer or expert of a DeepSpeed run.",
        "Give the directory of the run or tag: ckptconv zero-to-fp32 {} OUTPUT",
        _of_deepspeed,
    ),
    LoneKind(
        "is the model file of a DeepSpeed run: its weights have the dtype of the training run. The fp32 master "
        "weights are in the optimizer files.",
        "To convert the master weights: ckptconv zero-to-fp32 {} OUTPUT",
        _of_zero_1,
        refused=False,
    ),
    LoneKind(
        "belongs to one parameter of a universal checkpoint.",
        "Give the directory of the checkpoint: ckptconv zero-to-fp32 {} OUTPUT",
        _of_universal,
        up=3,
        lies=lambda place: place.parent.parent.name == ZERO,
    ),
    LoneKind(
        "contains the optimizer of a universal checkpoint, without the parameters.",
        "Give the directory of the checkpoint: ckptconv zero-to-fp32 {} OUTPUT",
        _of_universal_optimizer,
        up=2,
        lies=lambda place: place.parent.name == ZERO,
    ),
)
