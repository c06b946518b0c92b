"""The states of optimizers that are saved beside the weights of a model, by the names of its parameters.

In: the tree of a training checkpoint, or the optimizers of a format that has them elsewhere. `states` reads them,
whichever program saved them, nested or flat; `training` finds those next to weights; `numbering` asks the feature
`optimizer_numbers` to name states that are stored by the number of their parameter. Out: a `Source` with its
`optimizer`. The features that read or write formats with optimizers build on this one.
"""

from __future__ import annotations

PAGES = ()
