"""Directories of torch.distributed.checkpoint (DCP), as FSDP, torchtitan and Megatron-core leave them.

In: the place of a directory. `metadata` reads its description, `entries` where each chunk lies in the `.distcp`
files, `chunks` joins them, `paths` says what is model and what optimizer. Out: a `Source`."""
