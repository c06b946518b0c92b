"""Torch's oldest files: the tar archives that torch.save wrote before 0.1.10, and that torch.load still reads.

In: the reader of a file that begins with a tar header. Out: a `TorchFile`, as of the newer containers.
"""

from __future__ import annotations

PAGES = ()
NEEDS = ("consecutive",)
