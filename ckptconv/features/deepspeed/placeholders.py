"""Model files in which ZeRO-3 left placeholders for the weights.

Source: DeepSpeed's runtime/zero/partition_parameters.py and runtime/engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptconv.errors import CorruptError
from ckptconv.formats.alone import LoneKind, listed
from ckptconv.formats.lone_file import LoneFile
from ckptconv.formats.optimizers import subtree, weights_key
from ckptconv.formats.run_names import LATEST, tags_in
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import LazyTensor


def _has_placeholders(file: LoneFile) -> bool:
    """Return whether at least half of the weights have the shape of ZeRO-3's placeholders.

    Such a file still stores some parameters whole: factors of LoRA in a model, norms, and others that are smaller than
    stage3_param_persistence_threshold.
    """
    weights = subtree(file.tree, weights_key(file.tree))
    shapes = {
        name: value.shape
        for name, value in (weights.items() if isinstance(weights, Mapping) else ())
        if isinstance(value, LazyTensor) and f".{name}".endswith(".weight")
    }
    counted = [shape for name, shape in shapes.items() if ".lora_" not in name] or [*shapes.values()]
    return bool(counted) and 2 * counted.count((0,)) >= len(counted)


def _is_in_checkpoint(place: Location) -> bool:
    """Return whether a file is in the directory of a DeepSpeed checkpoint."""
    return LATEST in listed(place.parent) or bool(tags_in(place.parent))


LONE = (
    LoneKind(
        "lacks its weights: at least half of its tensors have the shape [0], like the placeholders that ZeRO-3 saves "
        "without stage3_gather_16bit_weights_on_model_save.",
        "The weights are in the DeepSpeed checkpoint of the same step. Give its directory: ckptconv zero-to-fp32 {} "
        "OUTPUT",
        _has_placeholders,
        error=CorruptError,
        lies=_is_in_checkpoint,
    ),
)
