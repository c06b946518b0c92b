"""The names of the files of a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import re

from ckptconv.storage.paths import basename

METADATA = ".metadata"
SUFFIX = ".distcp"
# Megatron-core's manifest with the SHA-256 of the files.
INTEGRITY = "integrity.json"
# Names in a complete step.
MARKERS = (METADATA, INTEGRITY)
RANK = r"__(\d{1,9})\.metadata"
# torch's names of the files of a rank.
FILE = r"__\d+_\d+\.distcp"
SHARD = r"shard-(\d{5})-.*\.safetensors"
# The name of the shard of a rank, as torch's HuggingFaceStorageWriter has it.
_OF_RANK = "shard-{:05d}-model-00001-of-00001.safetensors"
# The key, in a safetensors file's metadata, of where each tensor begins in the tensor that it is a chunk of.
SHARDING = "DCP_SHARDING_INFO"


def shard_name(number: int) -> str:
    """Return the name of the shard of rank `number`, from 1."""
    return _OF_RANK.format(number)


def is_part(path: str) -> bool:
    """Return whether a file of this name is part of a checkpoint rather than a checkpoint."""
    name = basename(path)
    of_rank = name.startswith("__") and re.fullmatch(RANK, name) is not None
    return name == METADATA or name.endswith(SUFFIX) or of_rank
