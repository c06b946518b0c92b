"""The Hugging Face hub as a store: hf://organization/model.

In: URLs of repositories. Out: `STORE`, for the feature `remote`. Repositories are read, at one commit each,
and not written.
"""

from __future__ import annotations

# Features that this one builds on: without them, it is gone too.
NEEDS = ("remote",)
