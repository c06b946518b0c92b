"""Embedding tables that are saved as whole rows: split into tensors, packed again, checked.

In: paths of tables, and the layout of their rows. Out: plans for `publish`, and reports. Parts of rows are columns of
one tensor, so splitting and packing are ordinary conversions; nothing else in the package knows of rows.
"""

from __future__ import annotations

PAGES = ("embedding-rows.md",)
# The features that it builds on: tables are packed into files for torch.load.
NEEDS = ("spool", "torch_files", "torch_output")
