"""Faults planted into what writes `.pt` files."""

from __future__ import annotations

from typing import Any

from faults import Plant, wrapped

from ckptconv.features.torch_files import archive, tree
from ckptconv.plan import FilePlan

_PT: dict[str, Any] = {"output": "back.pt"}


def storages_exchanged(right: Any, name: str, description: bytes, storages: Any, *rest: Any) -> FilePlan:
    """Two storages of one size are in each other's place."""
    order = list(storages)
    sizes = [storage.nbytes for storage in order]
    one = next(at for at, size in enumerate(sizes) if size > 64 and size in sizes[at + 1 :])
    other = sizes.index(sizes[one], one + 1)
    order[one], order[other] = order[other], order[one]
    return right(name, description, order, *rest)


def strides_of_another(right: Any, this: Any, leaf: Any, facts: Any) -> Any:
    room, offset, strides = right(this, leaf, facts)
    return room, offset, strides[::-1]


def archived_at_wrong_byte(right: Any, this: Any, leaf: Any, facts: Any) -> Any:
    room, offset, strides = right(this, leaf, facts)
    return room, offset + (1 if offset else 0), strides


FAULTS: dict[str, tuple[Plant, dict[str, Any]]] = {
    "storages are in each other's place": (wrapped(tree, "file_plan", storages_exchanged), _PT),
    "an archive has the strides of another": (wrapped(tree.TorchTree, "place", strides_of_another), _PT),
    "an archive is read one element on": (wrapped(tree.TorchTree, "place", archived_at_wrong_byte), _PT),
    "an archive has other checksums": (wrapped(archive, "crc_of", lambda right, *args: right(*args) ^ 1), _PT),
}
