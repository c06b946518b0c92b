"""Regular expressions that come from a file.

In: lists of expressions, and names. Out: which expression is the first that matches each name, or the names as the
expressions change them; an error if that takes too long. The features that read such expressions build on this one.
"""

from __future__ import annotations

PAGES = ()
