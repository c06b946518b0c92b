"""Checks of the directory of a model that a conversion writes: which files of the input's directory it does not have,
and why; and what its configuration says that is not true of its weights.

In: the names in the input's directory; a configuration, with names and dtypes of the tensors beside it. Out: notes and
warnings. Nothing is changed.
"""

from __future__ import annotations

PAGES = ()
# Features that this one builds on: without them, it is gone too.
NEEDS = ("companions", "configs", "model_facts")
# Reasons why files with weights are left: they may have been meant.
WEIGHTS, STEP = "other weights", "named like another step"
FOLDER = "folders are not copied"
