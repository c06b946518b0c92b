"""Universal checkpoints of DeepSpeed as outputs, from which a training goes on with any number of ranks.

In: a `Source` of any format, whose optimizer's states `taking` asks for. `resuming` derives what DeepSpeed resumes
from, `trees` what each file holds, `output` plans the files, `with_verify` compares them with their source. `kind` has
their entry in the table of kinds.
"""

from __future__ import annotations

PAGES = ()
# The features that it builds on.
NEEDS = ("optimizer_states", "torch_files", "trees")
