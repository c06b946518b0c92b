"""Formats of other packages, which are found by their entry points.

In: what is installed. Out: formats that are asked after those of this package, or if a caller names one.
"""

from __future__ import annotations

PAGES = ("plugins.md",)
