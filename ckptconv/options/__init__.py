"""The options: one table of their names, kinds of value, defaults and effects.

In: what a caller gave, from Python, the command line, the environment or a manifest. Out: `Options` and `RowOptions`.
"""
