"""The Hugging Face hub as a store: hf://organization/model.

In: URLs of repositories. Out: what `storage.stores` has of a store. Repositories are read, at one commit each, and not
written.
"""

from __future__ import annotations
