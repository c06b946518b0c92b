"""Directories of torch.distributed.checkpoint (DCP) as outputs, which `dcp.load` and accelerate load.

In: a `Source`, with the optimizer's states of another one, which `states` finds. `contents` makes its state dict and
plans the files, with `describing` their description; `optimizer` arranges the states, and `layout` and `imitating` cut
the files like those of another checkpoint. Out: an output. `kind`, `shards_kind` and `accelerate_kind` have the entries
of such outputs in the trunk's tables, `output` and `accelerate` plan them, and `with_verify` compares them with their
source. `safetensors2dcp` is the command.
"""

from __future__ import annotations

PAGES = ()
# The features that it builds on: it reads what it is to be like, and what it has written.
NEEDS = ("dcp", "joining", "optimizer_states", "torch_files", "unflattening")
SCRIPTS = ("test_dcp.py",)
