"""Megatron-core's additions to a checkpoint of torch.distributed.checkpoint.

In: the directory of a checkpoint. `extra` reads the values that all ranks share and those of its objects, shapes the
optimizer's states, and takes masters or single layers if they are asked for; `fsdp` does so for Megatron-FSDP.
`optimizers` finds the groups of its optimizers.
"""

from __future__ import annotations

PAGES = ()
# The features that it adds to.
NEEDS = ("companions", "dcp", "joining")
