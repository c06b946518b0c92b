"""`--depfile`: a rule for make, by which an output is made anew when a file has changed that it was made of.

In: the outputs of a conversion, and the files that it read. Out: a Makefile with one rule, which `include` reads.
"""
