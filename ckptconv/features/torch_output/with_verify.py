"""Compare a file for torch.load with its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptconv.features.pairs.runs import ExpectedPair
from ckptconv.features.torch_files import writable
from ckptconv.features.torch_files.with_verify import check_manifest, compare_torch
from ckptconv.features.torch_output.selecting import selected_tree
from ckptconv.features.unflattening.decoder import unflatten
from ckptconv.features.verify.names import rename_of
from ckptconv.features.verify.pairs import Attested, Differences
from ckptconv.features.verify.report import CheckedOutput, Verification
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.storage.paths import is_remote
from ckptconv.structure.reading import parse, tensors_of
from ckptconv.structure.record import dump


def pairs(
    source: Source, target: CheckedOutput, options: Options, done: Verification, attested: Attested, wrong: Differences
) -> Iterator[ExpectedPair]:
    """Compare the file with the tree that it must hold, and yield the pairs of its tensors."""
    place = target.place if target.at is None else target.place.at(next(iter(target.at.values())))
    yield from compare_torch(source, expected_tree(source, options), target.path, place, options, done, wrong)
    if target.manifest and not is_remote(place.path):
        attested.later(check_manifest, target.manifest, source, target.planned, {target.place.name: place.path})


def expected_tree(source: Source, options: Options) -> Any:
    """Return the tree that a `.pt` file must hold."""
    chosen = selected_tree(source, options, rename_of(options))
    tensors = {name: chosen.cast(name) for name in chosen.tensors}
    record = chosen.described.structure
    if record is not None and options.opaque == "drop":
        record = _without_classes(record)
    return unflatten(tensors, record if options.structure else None, live_values=False)


def _without_classes(record: str) -> str:
    """Return the record with tensors of unlisted subclasses made plain ones, as they are written."""
    parsed = parse(record)
    for leaf, _ in tensors_of(parsed):
        kind = leaf.get("kind", "tensor")
        if type(kind) is not str or (kind not in writable.KINDS and writable.is_unlisted_kind(kind)):
            del leaf["kind"]
    return dump(parsed.root, parsed.nodes, parsed.storages)
