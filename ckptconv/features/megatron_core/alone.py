"""The file of a checkpoint of Megatron-core without tensors, and the path to give in its place."""

from __future__ import annotations

from ckptconv.features.dcp.names import METADATA
from ckptconv.formats.alone import LoneKind, listed
from ckptconv.formats.lone_file import LoneFile
from ckptconv.pickles.children import walk
from ckptconv.tensors.lazy import LazyTensor

# The files of what all ranks have alike, and of the configuration.
COMMON, CONFIG_FILE = "common.pt", "metadata.json"
# The configuration of a training by Megatron-Bridge, which is beside the tensors, and the most bytes that it may have.
RUN_CONFIG, LARGEST_RUN_CONFIG = "run_config.yaml", 1 << 22
# Names in a complete step: of Megatron-core, and of verl, which saves by it.
MARKERS = (CONFIG_FILE, "ckpt_contents.json")


def _of_megatron_core(file: LoneFile) -> bool:
    # It holds the training's arguments and counters, wherever the tensors are.
    return file.place.name == COMMON and (
        METADATA in listed(file.place.parent) or not any(isinstance(node, LazyTensor) for node in walk(file.tree))
    )


LONE = (
    LoneKind(
        "is the part of a Megatron-core checkpoint without tensors.",
        "Give the directory: ckptconv dcp2safetensors {} OUTPUT",
        _of_megatron_core,
    ),
)
