"""Files that torch.save and torch.jit.save wrote, in each of their containers.

In: the location of a file, or of the index of several. `zip` reads archives. `storages`, `objects` and `numpy_objects`
read what torch writes into pickles. Features read other containers, whole modules, and programs. Out: a
`Source`, or a `TorchFile` for the formats that consist of such files."""

from __future__ import annotations

# Suffixes of files that torch.save wrote.
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
