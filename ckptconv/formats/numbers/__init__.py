"""The parameter of each number of an optimizer: the one place that decides it.

torch.optim numbers parameters in the order in which the optimizer was given them. A number gets a name from a record of
the save itself, from a known order of the model, or from a shape that occurs once; otherwise it is refused. `matching`
decides, `orders` has the orders of checkpoints and architectures, `order_files` reads the files that contain them.
`states` gives an optimizer's states these names.
"""
