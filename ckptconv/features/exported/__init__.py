"""Archives of torch.export (.pt2), opened as a checkpoint: the weights of the program in it.

In: a zip archive with a description of the weights and a member for each, or with a file of torch.save, as older
releases wrote it. Out: a `Source` with the state dict of the program.
"""

from __future__ import annotations

PAGES = ()
