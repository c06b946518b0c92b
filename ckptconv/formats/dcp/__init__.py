"""Directories of torch.distributed.checkpoint (DCP), as FSDP, torchtitan and Megatron-core write them.

In: the place of a directory. `metadata` reads its description, `entries` finds each chunk in the `.distcp` files,
`formats.chunks` joins them, `paths` says what is model and what optimizer, `megatron` what Megatron-core adds. Out: a
`Source`.
"""

# The module of the classes in `.metadata`, which names one of them after its first few bytes.
from __future__ import annotations

MODULE = "torch.distributed.checkpoint.metadata"
# Megatron-core's object with what all ranks have alike: a list of one dict.
COMMON_STATE = "common_state/shard_0_1"
