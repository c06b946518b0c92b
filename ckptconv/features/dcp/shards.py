"""A rank's shard of torch.distributed.checkpoint in safetensors, by itself, and what to name in its place.

Source: torch's distributed/checkpoint/hf_storage.py.
"""

from __future__ import annotations

from ckptconv.features.dcp.names import SHARD, SHARDING
from ckptconv.formats.alone import LoneKind, matching

LONE = (
    LoneKind(
        "is one rank's shard, written by HuggingFaceStorageWriter of torch.distributed.checkpoint: it contains "
        "pieces of tensors.",
        "Give the directory: ckptconv dcp2safetensors {} OUTPUT",
        lambda file: SHARDING in file.metadata or matching(SHARD, file.place.name) is not None,
        is_written=True,
    ),
)
