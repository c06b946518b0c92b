"""What a checkpoint gives to programs: the files of a conversion without writing them, as a file system and a server.

In: a path and options. Out: bytes at any range, which are those that a conversion writes.
"""
