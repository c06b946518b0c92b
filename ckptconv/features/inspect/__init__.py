"""What is inside a checkpoint, as data, as lines of text, and as a page.

In: a path, or a `Source`. Out: a `Summary`, and text; a page is a file. `NOTES` in `inspecting` names what other
features say of a checkpoint.
"""

from __future__ import annotations
