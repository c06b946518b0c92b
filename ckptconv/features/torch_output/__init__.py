"""Files for torch.load as an output of conversions, and `safetensors2pt`, the command for them.

In: a `Source`, whose tree may be that of a structure record. `selecting` chooses its tensors and values, `restore`
plans the file, and `output` has the plan function of the kind, whose entry is in `kind`. `with_verify` compares a file
with its source, and `classes` says which classes of a report are not written back. Out: an output of one file.
"""

from __future__ import annotations

PAGES = ()
# The features that it builds on.
NEEDS = ("torch_files", "unflattening")
# The endings of the names of its outputs in the examples of pages.
ENDINGS = (".pt",)
