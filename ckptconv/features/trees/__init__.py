"""Directories that are published as a whole, and the file next to each, which names it and comes last.

In: outputs of a form of `TREES` (`formats/run_names.py`), such as a training's step. Out: their staging on a disk, and
the decision whether an earlier directory may be replaced. `TREE_FEATURE` in `outputs/targets.py` names the feature.
"""

from __future__ import annotations
