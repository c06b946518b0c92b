"""The extent of a checkpoint: whether its files have the bytes of all that its description names, and how many are
weights. No entry is read, so that a step costs one listing and one read of `.metadata`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ckptconv.errors import CorruptError
from ckptconv.features.dcp.described import describe
from ckptconv.features.dcp.entries import Entries
from ckptconv.features.dcp.locate import located
from ckptconv.features.dcp.metadata import Description
from ckptconv.features.joining import names as dcp_names
from ckptconv.features.joining.names import named
from ckptconv.storage.location import Location

CALLED = "torch.distributed.checkpoint"


class Extent(NamedTuple):
    """Bytes of the weights, and of the optimizer's states."""

    weights: int
    optimizer: int


def extent_of(place: Location) -> Extent:
    """Return the extent of the checkpoint in or below the directory `place`. Raise CorruptError if bytes of it are
    missing, and the errors of reading its description."""
    checkpoint = located(place)
    places = [checkpoint.directory, *([checkpoint.optimizer] if checkpoint.optimizer else [])]
    both = [_extent(directory) for directory in places]
    return Extent(sum(extent.weights for extent in both), sum(extent.optimizer for extent in both))


def _extent(place: Location) -> Extent:
    described = describe(place)
    listed = {name: entry.file for name, entry in place.names.items() if entry.kind == "file"}
    Entries(place, described, listed).find(described.places())
    roles = dcp_names.Roles.of(described.paths.values(), [described.paths[name] for name in described.tensors])
    weights = optimizer = 0
    for name, nbytes in _covered(place, described):
        path = described.paths[name]
        if roles.optimizer_of(path) is not None:
            optimizer += nbytes
        elif roles.is_model(path):
            weights += nbytes
    return Extent(weights, optimizer)


def _covered(place: Location, described: Description) -> Iterator[tuple[str, int]]:
    """Yield each tensor and its bytes. Raise CorruptError for one whose chunks are fewer than its elements."""
    for name, tensor in described.tensors.items():
        elements = math.prod(tensor.shape)
        covered = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if covered != elements:
            raise CorruptError(f"{place}: {named(name)} has {elements} elements, but its chunks have {covered}.")
        yield name, tensor.nbytes
