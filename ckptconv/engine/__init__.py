"""From a plan to bytes that are written: tasks, threads, buffers, checksums on the way. Knows no format and no store.

In: a file's plan (`ckptconv.plan`) and readers and writers (`ckptconv.storage.files`). Out: the file's bytes, in any
order of windows, and the CRC-32s that were asked for. Memory is bounded by the buffers that it is given."""
