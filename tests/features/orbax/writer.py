"""Writes steps of Orbax: trees, and a database with their arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from features.ocdbt.writer import database
from features.zarr.writer import chunked


def entry(*keys: str | int, **value: Any) -> dict[str, Any]:
    """An entry of a tree, by its keys and indices."""
    return {
        "key_metadata": [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in keys],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, **value},
    }


def metadata(*entries: Mapping[str, Any], **more: Any) -> str:
    """The text of _METADATA."""
    told = {repr(tuple(key["key"] for key in each["key_metadata"])): each for each in entries}
    return json.dumps({"tree_metadata": told, "use_zarr3": False, **more})


def step(place: Path, arrays: Mapping[str, np.ndarray[Any, Any]], *, compressed: bool = True, rows: int = 64) -> Path:
    """A step with these arrays, each in chunks of so many rows."""
    values: dict[str, bytes] = {}
    for name, array in arrays.items():
        values |= chunked(name, array, (min(rows, array.shape[0]), *array.shape[1:]), compressed=compressed)
    database(place, values)
    (place / "_METADATA").write_text(metadata(*(entry(*name.split(".")) for name in arrays)))
    return place
