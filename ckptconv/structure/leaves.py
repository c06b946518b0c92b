"""Tensors as leaves of a tree: the facts that all have, and the feature that knows live objects of torch and numpy.

Neither torch nor numpy is imported here: a tree cannot hold objects of a library that is not imported.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from ckptconv.process import needed
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.strides import is_contiguous
from ckptconv.text import brief

# The feature that knows live objects. In its folder,
# - `tensors` has `taken(value)`: a tensor or a storage of torch as a tensor, detached, and the facts about it, None for
#   others; `stored(tensor, dtype)`, its bits as elements of another dtype; and `viewed_as(tensor, dtype, shape)`, the
#   way back;
# - `objects` has `inert(value)`, the node that stands for any other object;
# - `memory` has `Memory`, the live objects that are made of one record.
LIVE = "live_objects"


def live(name: str, example: Any) -> Any:
    """Return the module `name` of the feature. Raise UsageError, which shows the `example` of a live object, if it is
    not installed."""
    subject = f"An object of torch or another library ({brief(example)})"
    return needed(LIVE, name, subject, "Give plain values and lazy tensors.")


def is_imported() -> bool:
    """Return whether torch is imported."""
    return sys.modules.get("torch") is not None


def is_tensor(value: Any) -> bool:
    """Return whether `value` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def dtype_name(tensor: Any) -> str:
    """Return the name of the dtype of a LazyTensor or a torch tensor, as in `tensors.DTYPES`; of others, its text."""
    dtype = tensor.dtype
    return dtype.name if type(dtype) is DType else _text_of(dtype).removeprefix("torch.")


# There are many tensors, of few dtypes.
_text_of = functools.lru_cache(maxsize=256)(str)


@functools.lru_cache(maxsize=4096)  # there are many tensors, but few distinct shapes
def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether elements with these `strides` are dense, with the dimensions in some order."""
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    return is_contiguous(tuple(shape[dim] for dim in order), tuple(strides[dim] for dim in order))
