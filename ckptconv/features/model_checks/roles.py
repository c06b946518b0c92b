"""The files in the directory of a model, by their roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.companions.deciding import is_directory
from ckptconv.features.companions.directory import ROWS
from ckptconv.features.model_checks import FOLDER, STEP
from ckptconv.features.model_checks.left import STAYING, UNKNOWN, of_folder, reason_of, row_of
from ckptconv.features.model_checks.meant import told
from ckptconv.formats.model_files import SAFETENSORS
from ckptconv.formats.registered import is_companion_name
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
    """Return the names in the directory of a model by their roles; None if it has only the weights of `source`."""
    if not is_directory(source, storage_options or {}):
        return None
    place = Location(source.path, dict(storage_options or {}))
    warnings += _unclear(source, place)
    if not any(map(is_companion_name, place.names)):
        return None
    order = [*(row.role for row in (*ROWS, *STAYING)), FOLDER, STEP, UNKNOWN]
    roles: dict[str, list[str]] = {}
    for name in sorted(place.names):
        row = row_of(name)
        role = row.role if row else of_folder(name) if place.names[name].kind == "directory" else UNKNOWN
        roles.setdefault(role, []).append(name)
    return dict(sorted(roles.items(), key=lambda item: order.index(item[0]) if item[0] in order else -1))


def _unclear(source: Source, place: Location) -> Sequence[str]:
    """Return a warning if weights in the directory at `place` may be meant as well as those that were read."""
    if source.family != SAFETENSORS:
        return ()
    unread = {name: entry for name, entry in place.names.items() if name not in source.inputs}
    try:
        return told(
            source, {place.join(name).path: reason_of(name, entry.kind) for name, entry in unread.items()}
        ).warnings
    except UsageError as error:
        return [error.message]
