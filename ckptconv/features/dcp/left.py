"""The parts of a checkpoint that are neither weights nor optimizer states."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ckptconv.features.dcp.described import Described
from ckptconv.features.joining.names import dotted, is_optimizer
from ckptconv.pickles.children import tensors_of


def left_of(checkpoint: Described, chosen: Collection[str], extra: Any) -> dict[str, list[Any]]:
    """Return the parts next to the `chosen` names, and those of these that are left out, each with its tensors; None
    for a value that was not read. `extra` is what a program added, which it keeps in part."""
    described, roles, left = checkpoint.described, checkpoint.roles, dict[str, list[Any]]()
    kept = {"common_state/shard_0_1", *(extra.common if described.nested else ())} if extra else set()
    for name, way in described.paths.items():
        part = dotted(way) if name in checkpoint.hidden else dotted(roles.part_of(way))
        is_left = name not in chosen or name in checkpoint.hidden
        if is_left and roles.optimizer_of(way) is None and part not in kept:
            tensor, value = described.tensors.get(name), checkpoint.hidden.get(name, ())
            own = [tensor] if tensor else [None] if value is None else tensors_of(value)
            left.setdefault(part, []).extend(own)
    if extra:
        names = [name for name in extra.left if not is_optimizer(name.partition(".")[0])]
        left |= {name: tensors_of(extra.rest) for name in names}
    return left
