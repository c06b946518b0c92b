"""The grammar of what honest pickles write: a table of productions, patterns, and a judge of what a pickle makes.

In: the name of a class or function, and the inert values that a pickle gives it. Out: whether a production allows that.
`table.txt` is made by `scripts/grammar.py` from the libraries themselves, and reviewed. A conversion needs none of it,
but for `--opaque keep`.
"""
