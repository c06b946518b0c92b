"""What Megatron-core has beside the tensors of a checkpoint of torch.distributed.checkpoint.

In: the directory of a checkpoint. `extra` reads the values that all ranks have alike and those of its objects, shapes
the optimizer's states, and takes masters or single layers where they are asked for.
"""

from __future__ import annotations

PAGES = ()
# What it adds to.
NEEDS = ("dcp",)
