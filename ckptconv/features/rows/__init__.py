"""Embedding tables that are saved as whole rows: split into tensors, packed again, checked.

In: paths of tables and what their rows consist of. Out: plans for `publish`, and reports. Rows are columns of one
tensor, so splitting and packing are ordinary conversions; nothing else of the package knows of rows.
"""

from __future__ import annotations

PAGES = ("embedding-rows.md",)
