"""The grammar of honest pickles: a table of productions, patterns, and a judge of the objects that a pickle makes.

In: the name of a class or function, and the inert values that a pickle gives it. Out: whether a production allows that.
`scripts/scan/grammar.py` makes `made.txt` from the libraries themselves; it is reviewed.
"""
