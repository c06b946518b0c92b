"""Virtual checkpoints: the safetensors files of a conversion described, and not written.

In: a source and options, as of any conversion. Out: a small file that says which bytes of the source, cast how, make up
each file. It is read like the files: as a checkpoint, and by `VirtualFiles` as the very files that it describes.
"""

from __future__ import annotations

# It is a kind of output and a command too.
EXCEEDS = "a description of tensors in other files is written, read and checked"
PAGES = ("virtual.md", "internals/virtual.md")
