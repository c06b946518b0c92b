"""Facts about a model: what the names of its tensors and its configuration say.

In: names and shapes of tensors; a configuration. Out: its layers, experts and components, by `places`; the numbers that
the configuration states, by `counts`; and changes of a configuration, by `edits`. No model is known by name.
"""

from __future__ import annotations

PAGES = ()
# The features that it builds on.
NEEDS = ("configs",)
