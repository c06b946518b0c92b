"""The inert pickle machine.

In: the bytes of a pickle, which may be hostile, and a `Vocabulary`: the names of a format as data. Out: a tree of
plain Python values and the nodes of `nodes`. Nothing that a pickle names is imported or called.
"""
