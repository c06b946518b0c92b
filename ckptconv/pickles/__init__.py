"""The inert pickle machine, and the writer of pickles.

In: the bytes of a pickle, which may be hostile, and a vocabulary: what a format's names mean. Out: a tree of plain
Python values and of the nodes of `nodes`. Nothing that a pickle names is imported or called. `writer` is the way
back."""
