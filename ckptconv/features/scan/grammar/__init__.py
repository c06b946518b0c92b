"""The grammar of what honest pickles write: a table of productions, patterns, and a judge of what a pickle makes.

In: the name of a class or function, and the inert values that a pickle gives it. Out: whether a production allows that.
`made.txt` is made by `scripts/scan/grammar.py` from the libraries themselves, and reviewed.
"""
