"""`ckptconv serve`: the files of a conversion over HTTP, without writing them.

In: a checkpoint, as `VirtualFiles`, which makes bytes at any range. Out: answers to GET and HEAD, under the paths by
which huggingface_hub downloads.
"""

from __future__ import annotations

PAGES = ("serve.md",)
