"""Steps that Megatron-LM loads with `--load`, as outputs: `torch_dist` checkpoints of Megatron-core.

In: a `Source` whose weights have Megatron-core's names, as a map gives them. `sharding` gives tensors the names and the
chunks under which Megatron-core stores them, `arguments` derives the arguments of a training from a configuration,
`states` arranges an optimizer's states and `groups` its groups of parameters, `imitating` reads the form of the step
that `--like` names, `output` plans the files, and `taking` asks for what these need of a source.
`kind` and `te_kind` have the entries in the table of kinds, and `with_verify` compares a step with its source.
"""

from __future__ import annotations

PAGES = ("megatron.md",)
SCRIPTS = ("test_megatron.py", "test_megatron_states.py")
FILES = ("requirements-megatron.txt",)
# The features that it builds on.
NEEDS = ("companions", "dcp", "dcp_output", "joining", "megatron_core", "torch_files", "trees")
