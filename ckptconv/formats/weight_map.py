"""The index of a sharded set, of torch files as of safetensors: which file holds which tensor.

Source: huggingface_hub's `serialization/_base.py`: {"metadata": {"total_size": …}, "weight_map": {tensor: file}}.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptconv.errors import CorruptError
from ckptconv.storage import strict_json
from ckptconv.storage.inside import check_inside
from ckptconv.storage.location import Location

# An index names a tensor in some 100 bytes.
_MOST = 128 << 20


class Index(NamedTuple):
    """What an index says: the file of every tensor, by its name; its metadata; the names of its members; and how many
    bytes it has."""

    weight_map: dict[str, str]
    metadata: dict[str, Any]
    members: frozenset[str]
    size: int


def read_index(place: Location) -> Index | None:
    """The index at `place`; None for what is JSON and no index.

    Raises CorruptError for what is no JSON, UnsafeError for names that lead out of its directory.
    """
    text = place.read_text(_MOST)
    try:
        told = strict_json.parse(text)
    except ValueError as error:
        raise CorruptError(f"{place} is not a sound index: {error}.", "Copy or download it again.") from None
    weight_map, metadata = (told.get("weight_map"), told.get("metadata")) if type(told) is dict else (None, None)
    metadata = {} if metadata is None else metadata
    if type(weight_map) is not dict or type(metadata) is not dict:
        return None
    # Files are few, and each is named by very many tensors.
    files: dict[str, str] = {}
    for tensor, file in weight_map.items():
        if type(file) is not str:
            return None
        weight_map[tensor] = files.setdefault(file, file)
    for name in files:
        check_inside(name, place.path, place.parent.path)
    return Index(weight_map, metadata, frozenset(told), len(text))
