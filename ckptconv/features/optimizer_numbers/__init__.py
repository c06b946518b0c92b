"""The names of optimizer states that are stored by the number of their parameter.

torch.optim numbers parameters in the order in which the optimizer was given them. In: an optimizer's states by number,
and the model's parameters. A number gets a name from a record of the save itself, from a known order of the model, or
from a shape that occurs once; otherwise it is refused. Out: the states by name, with `naming`. `matching` decides,
`orders` has the orders of checkpoints and architectures, `order_files` reads the files that contain them, and `beside`
finds the optimizer in a file next to a model.
"""

from __future__ import annotations

SCRIPTS = ("module_orders.py",)
# The features that it builds on.
NEEDS = ("configs", "optimizer_states")
