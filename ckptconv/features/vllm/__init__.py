"""A model loader of vLLM, which finds it by an entry point: weights from a checkpoint of any format.

In: what vLLM says of a model. Out: pairs of name and torch tensor, as `ckptconv.open` gives them.
"""

from __future__ import annotations

PAGES = ("vllm.md",)
