"""A model loader of vLLM, which finds it by an entry point: weights from a checkpoint of any format.

In: vLLM's description of a model. Out: pairs of name and torch tensor, as `ckptconv.open` returns them.
"""

from __future__ import annotations

PAGES = ("vllm.md",)
# The features that it builds on.
NEEDS = ("arrays",)
