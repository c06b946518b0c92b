"""The files in the directory of a model, by their roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.features.model_checks.left import FOLDER, STAYING, UNKNOWN, is_directory, row_of
from ckptconv.formats.model_directory import ROWS, is_companion_name
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import LazyTensor


def survey(
    source: Source,
    kept: Mapping[str, LazyTensor],
    which: Options,
    storage_options: Mapping[str, Any] | None,
    warnings: list[str],
) -> dict[str, list[str]] | None:
    """Return the names in the directory of a model by their roles; None if nothing else of a model is beside the
    weights of `source`."""
    if not is_directory(source, storage_options or {}):
        return None
    place = Location(source.path, dict(storage_options or {}))
    if not any(map(is_companion_name, place.names)):
        return None
    order = [*(row.role for row in (*ROWS, *STAYING)), FOLDER, UNKNOWN]
    roles: dict[str, list[str]] = {}
    for name in sorted(place.names):
        row = row_of(name)
        role = row.role if row else FOLDER if place.names[name].kind == "directory" else UNKNOWN
        roles.setdefault(role, []).append(name)
    return dict(sorted(roles.items(), key=lambda item: order.index(item[0]) if item[0] in order else -1))
