"""Checkpoints of Megatron-FSDP (`fsdp_dtensor`), as outputs.

In: a `Source` whose weights have Megatron-core's names, as a map gives them. `parameters` gives each parameter the name
that it has in the model, and `output` plans the files. `kind` has the entry in the table of kinds.
"""

from __future__ import annotations

PAGES = ("megatron-fsdp.md",)
SCRIPTS = ("test_megatron_fsdp.py",)
# The features that it builds on.
NEEDS = ("dcp_output", "joining", "megatron_core", "megatron_output", "torch_files", "trees")
