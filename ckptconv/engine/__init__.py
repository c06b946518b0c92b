"""Carries out plans: tasks, threads, buffers, and checksums of the data. Knows no format and no store.

In: a file's plan (`ckptconv.plan`) and readers and writers (`ckptconv.storage.files`). Out: the file's bytes, written
as windows in any order, and the requested CRC-32s. Memory is bounded by the buffers it is given.
"""
