"""All that opens a file or a connection.

In: paths and URLs. Out: readers of ranges, writers, listings. `files` reads, `writing` writes, `remote` reaches
stores through fsspec, `prefetch` reads ahead in few requests, `spool` keeps what can be read only once, `uploads`
writes to stores. Nothing here knows a format."""
