"""Which parameter each number of an optimizer is of: the one place that decides it.

torch.optim numbers parameters in the order in which they were given to it. A number gets a name from a record of the
save itself, from a model's order that is known, or from a shape that occurs once; else it is refused. `matching`
decides, `orders` has the orders that checkpoints and architectures tell, `told` reads what tells them. `states` gives
an optimizer's states these names.
"""
