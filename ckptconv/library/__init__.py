"""Reading and loading: checkpoints as mappings of lazy tensors, and state dicts.

In: a path. Out: arrays of torch or numpy, which are maps of the files where the bytes lie as they are
needed, and copies otherwise. One mechanism, `memory`, makes all arrays.

`virtual` gives the files of a conversion without writing them, for a file system and a server: bytes at any range,
which are those that a conversion writes.
"""
