"""Reading and loading: checkpoints as mappings of lazy tensors, and state dicts.

In: a path. Out: arrays of torch or numpy, which are maps of the files where the bytes lie as they are
needed, and copies otherwise. One mechanism, `memory`, makes all arrays.
"""
