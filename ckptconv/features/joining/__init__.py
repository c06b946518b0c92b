"""Tensors that are in parts: chunks of arrays, and the state dicts of ranks.

In: descriptions of parts, or the pickles of all ranks. `chunks` joins boxes of any array, whose bytes are `values` by
key. `run_layout` finds a checkpoint below the directory of a run, and `sets` the files of ranks by name; `pieces` reads
a rank's part of a tensor, `layouts` computes which part of the tensor that is, and `join` joins the parts. `names`
tells model from optimizer, and `states` names the optimizer's states. Out: tensors, and a `Source`, which `files`
returns. The features that read such formats build on this one.
"""

from __future__ import annotations

PAGES = ()
# The features that it builds on.
NEEDS = ("optimizer_states",)
