"""Files for torch.load, planned of any tree, and compared with one.

In: a tree of plain values, lazy tensors and nodes of `pickles.nodes`. Out: a `FilePlan`. `tree` arranges tensors in
storages, which `storage` puts together, and describes the tree in a pickle, which `writer` writes; `torch_zip` lays out
the archive that `archive` plans. `writable` decides which classes a pickle may name, and `refusing` says which it may
not. `with_verify` compares a file with the tree that it must hold. The features that write such files build on this
one.
"""

from __future__ import annotations

PAGES = ()
