"""The stream format of torch.save: pickles one after another, and storages after them.

In: the reader of a file that begins with the magic number of the format. torch.save wrote it before 1.6, and does since
then with `_use_new_zipfile_serialization=False`. Out: a `TorchFile`, as of a zip archive.
"""

from __future__ import annotations

PAGES = ()
NEEDS = ("consecutive",)
