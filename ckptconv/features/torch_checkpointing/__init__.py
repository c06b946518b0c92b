"""Steps that the library torch_checkpointing saved: a directory with one file for each item of the state dict and rank.

`locate` recognizes a step and finds its files; `metadata` reads `metadata.pkl`; `read` makes a `Source` of both, and
joins the parts of ranks. `kind` has the entries of such an output in the trunk's tables, `output` plans it, and
`with_verify` compares it with its source.
"""

from __future__ import annotations

PAGES = ()
SCRIPTS = ("kills/torch_checkpointing.py",)
# Its output is the state dict of a checkpoint of torch.distributed.checkpoint, with the same options.
NEEDS = ("dcp_output", "joining", "torch_files")
# The reason why it exceeds the budget of a container of files.
EXCEEDS = "it reads a format, with a description of its own, and writes it, and compares its output"
