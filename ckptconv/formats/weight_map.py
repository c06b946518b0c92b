"""Reads the index of a sharded set, of torch files or safetensors: which file holds which tensor.

Source: huggingface_hub's `serialization/_base.py`: {"metadata": {"total_size": …}, "weight_map": {tensor: file}}.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

from ckptconv.errors import damaged
from ckptconv.plan import Input
from ckptconv.storage import strict_json
from ckptconv.storage.inside import check_inside
from ckptconv.storage.location import Location

# The largest index read. An index takes some 100 bytes for a tensor.
_MOST = 128 << 20


class Index(NamedTuple):
    """An index: {tensor: file}; its metadata; the names of its JSON members; its entry of `Source.inputs`."""

    weight_map: dict[str, str]
    metadata: dict[str, Any]
    members: frozenset[str]
    identity: Input


def read_index(place: Location) -> Index | None:
    """Return the index at `place`; None for JSON that is not an index.

    Raise CorruptError if it is not JSON, UnsafeError if a file name leads out of its directory.
    """
    text = place.read_text(_MOST)
    try:
        index = strict_json.parse(text)
    except ValueError as error:
        raise damaged(f"{place} is not a valid index: {error}.") from None
    weight_map, metadata = (index.get("weight_map"), index.get("metadata")) if type(index) is dict else (None, None)
    metadata = {} if metadata is None else metadata
    if type(weight_map) is not dict or type(metadata) is not dict:
        return None
    # Many tensors share each file name: keep one string of it.
    files: dict[str, str] = {}
    for tensor, file in weight_map.items():
        if type(file) is not str:
            return None
        weight_map[tensor] = files.setdefault(file, file)
    for name in files:
        check_inside(name, place.path, place.parent.path)
    content = (len(text.encode()), zlib.crc32(text.encode()))
    return Index(weight_map, metadata, frozenset(index), Input(place.entry.file, content))
