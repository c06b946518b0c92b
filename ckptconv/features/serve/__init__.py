"""`ckptconv serve`: the files of a conversion over HTTP, without writing them.

In: a checkpoint, as `VirtualFiles`, which makes bytes of any range. Out: answers to GET and HEAD, under the paths from
which huggingface_hub downloads.
"""

from __future__ import annotations

PAGES = ("serve.md",)
NEEDS = ("virtual_files",)
