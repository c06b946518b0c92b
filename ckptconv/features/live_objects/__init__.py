"""Live objects of torch and numpy in trees: tensors of a program as leaves, and other objects as nodes.

In: a tree of a running program, flattened by `ckptconv.flatten`. Out: tensors and nodes; and of these, for
`ckptconv.unflatten`, live objects again, which share memory as before. Neither library is imported here: a tree cannot
hold objects of a library that is not imported. `objects` is asked by the trunk (`structure/leaves.py`), `tensors` tells
what a tensor is, and `memory` makes tensors that share it.
"""

from __future__ import annotations
