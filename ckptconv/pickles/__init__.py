"""The inert pickle machine, and the writer of pickles.

In: the bytes of a pickle, which may be hostile, and a `Vocabulary`: what the names of a format mean. Out: a tree of
plain Python values and the nodes of `nodes`. Nothing that a pickle names is imported or called. `writer` does the
reverse.
"""
