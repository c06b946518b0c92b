"""DeepSpeed's ZeRO and universal checkpoints, and the command for them.

In: the place of a directory. `locate` finds the files of a step, `records` reads their pickles as typed records,
`shapes` finds which parameters are in a group, `partitions`, `cuts` and `flat` where they are in its partitions;
`assemble` and `states` join weights and optimizer states of the ranks, `model_parallel` the ranks of a tensor- or
pipeline-parallel model. Out: a `Source`.
"""

from __future__ import annotations

PAGES = ()
SCRIPTS = ("test_deepspeed.py", "test_chain.py", "kills/deepspeed.py")
# A program that loads one of its checkpoints.
FILES = ("examples/load_zero.py",)
# Why it is larger than a container of files may be.
EXCEEDS = (
    "every release laid its files out otherwise, and partitions, experts, stages and tensor-parallel ranks are joined"
)
# The features that it builds on.
NEEDS = ("optimizer_states", "regexes")
