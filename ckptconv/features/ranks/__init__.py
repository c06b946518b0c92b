"""Checkpoints with a file for each rank, which torch.save wrote: verl's, accelerate's, hand-written FSDP loops'.

In: the location of a directory, or of one of its files. `locate` recognizes them, `read` opens the files of all ranks,
and `flat` divides FSDP1's flat parameters. Out: a `Source`.
"""

from __future__ import annotations

PAGES = ()
# Features that this one builds on: without them, it is gone too.
NEEDS = ("joining",)
# The reason why it exceeds the budget of a container of files.
EXCEEDS = "files of ranks are recognized by names alone, of several programs, with the flat parameters of FSDP1 in them"
