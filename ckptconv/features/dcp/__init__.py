"""Directories of torch.distributed.checkpoint (DCP), as FSDP, torchtitan and Megatron-core write them.

In: the place of a directory. `locate` recognizes it, `described` and `metadata` read its description, `entries` finds
each chunk in the `.distcp` files, `in_safetensors` in others, `joining.chunks` joins them, `joining.names` says what is
model and what optimizer, `dialects` which programs add more. Out: a `Source`. `dcp2safetensors` is the command.
"""

from __future__ import annotations

PAGES = ()
# Features that this one builds on: without them, it is gone too.
NEEDS = ("joining", "optimizer_states")
SCRIPTS = ("kills/dcp.py",)
# Why it is larger than a container of files may be.
EXCEEDS = "it reads a format of several writers"
# The module of the classes in `.metadata`, which names one of them after its first few bytes.
MODULE = "torch.distributed.checkpoint.metadata"
