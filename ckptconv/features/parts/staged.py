"""Find staged parts: on a disk, and on a store."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from ckptconv.errors import CorruptError
from ckptconv.formats.run_names import TREES
from ckptconv.outputs.targets import DIRECTORIES
from ckptconv.publish.manifest import MOST_DESCRIPTION
from ckptconv.publish.staging.area import DESCRIPTION, PUBLISHED, hidden, is_sibling
from ckptconv.storage.handles import HIDDEN, ForeignError, Handle, resolved
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.storage.stores import reached


class StagedParts(NamedTuple):
    """A staging directory of an output in parts.

    Its path, the plan id from its name, the kinds of output that are staged there, and the description in it.
    `published`: an earlier run has published the output and had only the clean-up left.
    """

    place: str
    plan_id: str
    kinds: tuple[str, ...]
    data: bytes
    published: bool


def described(place: Location) -> list[StagedParts]:
    """Return the staging directories of the output at `place` that contain parts."""
    return _described_there(place) if is_remote(place.path) else _described_here(place.path)


def _described_here(path: str) -> list[StagedParts]:
    """Return the staging directories of the output `path` that contain parts.

    Raises ForeignError if the only ones belong to another user, and CorruptError for an invalid description.
    """
    path = resolved(path)
    parent, name = os.path.split(path)
    all_found: list[StagedParts] = []
    foreign: list[ForeignError] = []
    for directory, prefix, kinds in ((path, HIDDEN, tuple(DIRECTORIES)), (parent, hidden(name), ("file", *TREES))):
        with contextlib.suppress(OSError), Handle.open(directory) as home:
            for token in sorted(name for name in home.names() if is_sibling(name, prefix)):
                try:
                    descriptions = list(_description_in(home, token, token[len(prefix) :], kinds))
                except ForeignError as error:
                    foreign.append(error)
                else:
                    all_found.extend(descriptions)
    if foreign and not all_found:
        raise foreign[0]
    return all_found


def _description_in(home: Handle, token: str, plan_id: str, kinds: tuple[str, ...]) -> Iterator[StagedParts]:
    if not stat.S_ISDIR(home.stat(token).st_mode):
        return
    with home.private(token) as staging:
        for name in (DESCRIPTION, PUBLISHED):
            try:
                data = staging.read(name, MOST_DESCRIPTION)
            except ValueError as error:
                raise CorruptError(
                    f"{os.path.join(staging.path, name)} is not a valid description of parts: {error}.",
                    "To replace it, run one of the parts again.",
                ) from None
            if data is not None:
                yield StagedParts(staging.path, plan_id, kinds, data, name == PUBLISHED)
                return


def directories(place: Location) -> list[str]:
    """Return the names of the directories in `place`, sorted."""
    if is_remote(place.path):
        names: list[str] = reached(place.path).directories(place)
        return names
    with contextlib.suppress(OSError), os.scandir(place.path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def _described_there(output: Location) -> list[StagedParts]:
    """Return the staging directories of plans for `output`, which is on a store."""
    descriptions = []
    for name in reached(output.path).directories(output):
        if is_sibling(name, HIDDEN):
            place = output.join(name)
            data = reached(place.path).content_of(place.join(DESCRIPTION), MOST_DESCRIPTION)
            if data is not None:
                descriptions.append(
                    StagedParts(place.path, name[len(HIDDEN) :], (*DIRECTORIES, *TREES), data, published=False)
                )
    return descriptions
