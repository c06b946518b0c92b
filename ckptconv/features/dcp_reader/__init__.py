"""`DistributedReader`: torch.distributed.checkpoint itself loads a checkpoint of any format.

In: a path, and the boxes of tensors that torch's planner asks for. Out: these, under the keys that a conversion to such
a checkpoint gives them. Each rank reads the bytes of its own shards.
"""

from __future__ import annotations

PAGES = ()
SCRIPTS = ("test_dcp.py",)
FILES = ("examples/load_fsdp2.py",)
# The features that it builds on: arrays of torch, and the keys of such a checkpoint.
NEEDS = ("arrays", "dcp_output", "joining", "unflattening")
