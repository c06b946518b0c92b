"""DeepSpeed's ZeRO and universal checkpoints.

In: the place of a directory. `locate` finds the files of a step, `records` reads their pickles as typed records,
`shapes` finds which parameters are in a group, `partitions` and `cuts` where they are in its partitions; `assemble` and
`states` join weights and optimizer states of the ranks, `model_parallel` the ranks of a tensor- or pipeline-parallel
model. Out: a `Source`."""
