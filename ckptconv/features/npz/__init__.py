"""Archives of numpy's arrays (.npz), opened as a checkpoint.

In: a zip archive of .npy members, stored or deflated. Out: a `Source` with a tensor for each array.
"""

from __future__ import annotations

PAGES = ()
