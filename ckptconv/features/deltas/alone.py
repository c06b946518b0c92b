"""The files of a delta, if a user takes them for weights, and the right command for them."""

from __future__ import annotations

from collections.abc import Mapping

from ckptconv.formats.alone import LoneKind
from ckptconv.formats.lone_file import LoneFile
from ckptconv.storage.paths import dirname
from ckptconv.tensors.lazy import LazyTensor


def _of_delta(file: LoneFile) -> bool:
    tensors = file.tree if isinstance(file.tree, Mapping) else {}
    return bool(tensors) and all(
        name in file.metadata
        and isinstance(tensor, LazyTensor)
        and tensor.dtype.name == "uint8"
        and len(tensor.shape) == 1
        for name, tensor in tensors.items()
    )


LONE = (
    LoneKind(
        "is one file of a delta: it contains compressed differences, not weights.",
        "Apply it to the checkpoint that it changes: ckptconv patch BASE {} OUTPUT",
        _of_delta,
        is_written=True,
    ),
)


def no_weights(path: str) -> tuple[str, str]:
    """Return a description of the delta whose index is at `path`, and the right command for it."""
    return (
        f"{path} is part of a delta: its tensors are compressed differences, not weights.",
        f"Apply it to the checkpoint that it changes: ckptconv patch BASE {dirname(path) or '.'} OUTPUT",
    )
