"""Packed files, such as compressed members of archives: a feature unpacks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ckptconv.errors import LimitError, UnsupportedError
from ckptconv.process import needed
from ckptconv.tensors.lazy import Concat, Convert, LazyTensor, Tagged, View
from ckptconv.tensors.moves import File

# A byte of deflate inflates to at most 1,032 bytes: two bits to 258.
MAX_RATIO = 1032
# The feature that unpacks packed files. In `unpacking` in its folder, `UNPACKING` has the methods, each with a function
# that yields the content of a file, given the `File`, its `Packed` and a reader of packed bytes; `Contents` opens
# readers of contents.
UNPACKING = "compressed"


def unpacking(name: str) -> Any:
    """Return the module that unpacks packed files. Raise UnsupportedError for the file `name` if there is none."""
    subject = f"{name} is compressed, and unpacking it"
    return needed(UNPACKING, "unpacking", subject, "Write the file uncompressed.", UnsupportedError)


def check_ratio(name: str, packed: int, size: int) -> None:
    """Raise LimitError if `packed` bytes of deflate cannot inflate to `size` bytes."""
    if size > MAX_RATIO * packed:
        raise LimitError(
            f"{name} should inflate from {packed} to {size} bytes, but deflate cannot produce more than "
            f"{MAX_RATIO * packed}."
        )


def packed(tensors: Iterable[LazyTensor]) -> Counter[File]:
    """Return the compressed files that `tensors` are read from, with the bytes of tensors that come from each."""
    sizes: Counter[File] = Counter()
    for tensor in tensors:
        files = tensor.inputs()
        if files and (files[0].packed or len(files) > 1):  # seldom
            for part in _joined_parts(tensor):
                sizes.update({file: part.nbytes for file in part.inputs() if file.packed})
    return sizes


def _joined_parts(tensor: LazyTensor) -> Iterator[LazyTensor]:
    """Yield the stored tensors that a tensor is joined from."""
    while isinstance(tensor, (Tagged, View, Convert)):
        tensor = tensor.tensor
    if not isinstance(tensor, Concat):
        yield tensor
        return
    for part in tensor.parts:
        yield from _joined_parts(part)
