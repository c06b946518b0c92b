"""Virtual checkpoints: descriptions of the safetensors files of a conversion, in the place of the files.

In: a source and options, as of any conversion. Out: a small file that says which bytes of the source, with which casts,
make up each file; `expressions` writes and reads them. It is read like the files: as a checkpoint, and by
`VirtualFiles` as the described files themselves.
"""

from __future__ import annotations

# The reason why it exceeds a format's budget: it is also a kind of output and a command.
EXCEEDS = "it writes, reads and checks a description of tensors in other files"
PAGES = ("virtual.md", "internals/virtual.md")
