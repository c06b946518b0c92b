"""The contents of a checkpoint, as data, as lines of text, and as a page.

In: a path, or a `Source`. Out: a `Summary`, and text; a page is a file. `NOTES` in `inspecting` names the modules of
other features with notes on a checkpoint.
"""

from __future__ import annotations

# Features that this one builds on: without them, it is gone too.
NEEDS = ("reporting",)
