"""A differential fuzzer: what we read of a file against what the common readers of its format read.

`trees` says what a value is in plain data, whoever read it; `readers` are the others, in processes of their own, which
`workers` starts and asks; `pickles` and `files` make the cases; `hunt` reads each of them with all, and judges.
"""
