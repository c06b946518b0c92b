"""Directories of torch.distributed.checkpoint (DCP), as FSDP, torchtitan and Megatron-core write them.

In: the place of a directory. `locate` recognizes it, `metadata` reads its description, `entries` finds each chunk in
the `.distcp` files, `joining.chunks` joins them, `joining.names` says what is model and what optimizer, `dialects`
which programs add more. Out: a `Source`.

The other way: `contents` makes the state dict of a `Source` and plans its files, with `describing` their description;
`kind`, `shards_kind` and `accelerate_kind` have the entries of such outputs in the trunk's tables, `output` and
`accelerate` plan them, and `comparing` compares them with their source. `distributed` has torch itself load any
checkpoint. `dcp2safetensors` and `safetensors2dcp` are the commands.
"""

from __future__ import annotations

PAGES = ()
# Features that this one builds on: without them, it is gone too.
NEEDS = ("joining", "torch_files")
SCRIPTS = ("test_dcp.py", "kills/dcp.py")
# Why it is larger than a container of files may be.
EXCEEDS = "it reads a format of several writers, and writes it, and compares its output, and has torch load others"
# The module of the classes in `.metadata`, which names one of them after its first few bytes.
MODULE = "torch.distributed.checkpoint.metadata"
