"""Checkpoints with a file for each rank, which torch.save wrote: verl's, accelerate's, hand-written FSDP loops'.

In: the place of a directory, or of one of its files. `locate` tells which files are a set, `pieces` what a rank's file
says of its part of each tensor, `layouts` where that part belongs, `join` puts the parts of all ranks together. `flat`
divides FSDP1's flat parameters, and `optimizer` tells whose each state is. Out: a `Source`.
"""
