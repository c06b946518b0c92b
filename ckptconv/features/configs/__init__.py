"""Configurations: the JSON objects next to weights that describe them, such as config.json.

In: a place, or the text of a file there. Out: the object, whose values are not checked yet, and what it says of dtypes.
The features that read, copy or change configurations build on this one.
"""

from __future__ import annotations

PAGES = ()
