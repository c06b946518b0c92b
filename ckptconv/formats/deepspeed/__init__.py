"""DeepSpeed's ZeRO and universal checkpoints.

In: the place of a directory. `locate` finds the files of a step, `records` reads their pickles as typed records,
`partitions` says how ZeRO cut the parameters, `assemble` joins the partitions of the ranks, `model_parallel` the
ranks of a tensor- or pipeline-parallel model. Out: a `Source`."""
