"""Compare structure records of files for torch."""

from __future__ import annotations

from collections.abc import Iterable

from ckptconv.structure.reading import name_of, parse, tensors_of
from ckptconv.structure.record import dump, plain_record


def without_storages(record: str | None, names: Iterable[str]) -> str:
    """Return the record with, instead of each tensor's place in its storage, the groups of names that share storage.

    The places may change: parts of a storage that no tensor covers are not written.
    """
    parsed = parse(record or plain_record(names))
    groups: dict[int, list[str]] = {}
    for leaf, implied in tensors_of(parsed):
        leaf.pop("dtype", None)
        if "storage" in leaf:
            groups.setdefault(leaf.pop("storage")[0], []).append(name_of(leaf, implied))
    shared = sorted(sorted(group) for group in groups.values() if len(group) > 1)
    return dump(parsed.root, parsed.nodes, shared)
