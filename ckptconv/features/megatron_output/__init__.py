"""Steps that Megatron-LM loads with `--load`, as outputs: `torch_dist` checkpoints of Megatron-core.

In: a `Source` whose weights have Megatron-core's names, as a map gives them. `sharding` gives tensors the names and the
chunks under which Megatron-core stores them, `arguments` derives the arguments of a training from a configuration,
`output` plans the files, `taking` asks for what these need of a source. `kind` has the entry in the table of kinds.
"""

from __future__ import annotations

PAGES = ("megatron.md",)
SCRIPTS = ("test_megatron.py",)
FILES = ("requirements-megatron.txt",)
# What it builds on.
NEEDS = ("dcp", "joining", "megatron_core")
