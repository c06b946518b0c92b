"""Directories of torch.distributed.checkpoint (DCP), as FSDP, torchtitan and Megatron-core write them.

In: the place of a directory. `metadata` reads its description, `entries` finds each chunk in the `.distcp` files,
`formats.chunks` joins them, `joining.names` says what is model and what optimizer, `dialects` which programs add more.
Out: a `Source`.
"""

# The module of the classes in `.metadata`, which names one of them after its first few bytes.
from __future__ import annotations

MODULE = "torch.distributed.checkpoint.metadata"
