"""Files of torch.distributed.checkpoint, as `scan` looks at them: descriptions, and the data that these describe."""

from __future__ import annotations

from ckptconv.features.dcp.locate import is_metadata
from ckptconv.features.dcp.names import METADATA, SUFFIX, is_part
from ckptconv.storage.location import Location


def is_data(place: Location, head: bytes) -> bool:
    """Return whether a file has entries that the metadata of its directory describes."""
    return place.name.endswith(SUFFIX)


def is_description(place: Location, head: bytes) -> bool:
    """Return whether a file, which begins with `head`, describes its directory, that is, names its files."""
    return is_part(place.path) or is_metadata(head)


def read(place: Location, data: bytes) -> None:
    """Read a description. Raise an error as when its directory is opened."""
    from ckptconv.features.dcp.metadata import read_description

    read_description([(place.path, data)], of_ranks=place.name != METADATA)


# The words for such files, their recognition, and the reader of those that describe others.
FILES = (
    ("torch.distributed.checkpoint data", is_data, None),
    ("torch.distributed.checkpoint description", is_description, read),
)
