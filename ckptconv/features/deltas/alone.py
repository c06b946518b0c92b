"""The files of a delta that somebody takes for weights, and what to do with them instead."""

from __future__ import annotations

from collections.abc import Mapping

from ckptconv.formats.alone import LoneFile, LoneKind
from ckptconv.storage.paths import dirname
from ckptconv.tensors.lazy import LazyTensor


def _of_delta(file: LoneFile) -> bool:
    tensors = file.tree if isinstance(file.tree, Mapping) else {}
    return bool(tensors) and all(
        name in file.metadata and isinstance(each, LazyTensor) and each.dtype.name == "uint8" and len(each.shape) == 1
        for name, each in tensors.items()
    )


LONE = (
    LoneKind(
        "is one file of a delta: it holds compressed differences, not weights.",
        "Apply it to the checkpoint that it changes: ckptconv patch BASE {} OUTPUT",
        _of_delta,
        is_written=True,
    ),
)


def no_weights(path: str) -> tuple[str, str]:
    """Return what is at `path`, if its index is that of a delta, and what to do with it."""
    return (
        f"{path} is part of a delta: its tensors are compressed differences, not weights.",
        f"Apply it to the checkpoint that it changes: ckptconv patch BASE {dirname(path) or '.'} OUTPUT",
    )
