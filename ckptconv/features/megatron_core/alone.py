"""The file of a checkpoint of Megatron-core that is no tensors, and what to name in its place."""

from __future__ import annotations

from ckptconv.features.dcp.names import METADATA
from ckptconv.formats.alone import LoneFile, LoneKind, listed
from ckptconv.pickles.children import walk
from ckptconv.tensors.lazy import LazyTensor


def _of_megatron_core(file: LoneFile) -> bool:
    # What is beside the tensors is the training's arguments and counters, whatever became of the rest.
    return file.place.name == "common.pt" and (
        METADATA in listed(file.place.parent) or not any(isinstance(each, LazyTensor) for each in walk(file.tree))
    )


LONE = (
    LoneKind(
        "is the part of a Megatron-core checkpoint without tensors.",
        "Give the directory: ckptconv dcp2safetensors {} OUTPUT",
        _of_megatron_core,
    ),
)
