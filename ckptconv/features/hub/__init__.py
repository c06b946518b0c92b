"""The Hugging Face hub as a store: hf://organization/model.

In: URLs of repositories. Out: the interface of a store in `storage.stores`. Repositories are read, at one commit each,
and not written.
"""

from __future__ import annotations
