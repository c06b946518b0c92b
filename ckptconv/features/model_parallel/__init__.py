"""Files of model-parallel ranks that do not describe their parts: Meta's Llama and Megatron-LM's older checkpoints.

In: the directory of a step or a release. Out: a `Source` of the only rank, or, for a map, one with the parts of all
ranks.
"""

from __future__ import annotations

PAGES = ()
# The reason why it exceeds the budget of a container of files.
EXCEEDS = "it reads the files of Megatron-LM and of Meta, and checks that the files of all ranks fit together"
# The features that it builds on.
NEEDS = ("joining",)
