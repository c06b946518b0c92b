"""Local directories and those on a store, and their differences: a store has no links, is asked as seldom as possible,
and an error of it is that of all its files."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckptconv.errors import FailedError, MissingError, UsageError
from ckptconv.formats.suggestions import nearby
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import Entry
from ckptconv.text import quoted


def check_directory(place: Location) -> None:
    """Raise MissingError if nothing is there, UsageError for anything but a directory. On a store, its listing shows
    that it is one."""
    if is_remote(place.path) and place.names:
        return
    if place.kind == "missing":
        raise MissingError(f"{place} does not exist.", nearby(place))
    if place.kind != "directory":
        raise UsageError(
            f"{place} is {place.entry.described}, but the directory of a run was expected.",
            f"Specify the run directory: {quoted(place.parent.path or '.')}.",
        )


def known(place: Location, entry: Entry) -> Location:
    """Return a location whose kind a listing has shown: a store is not asked again."""
    vars(place).setdefault("entry", entry)
    return place


def inside(place: Location, name: str) -> Location:
    """Return a directory in `place`."""
    return known(place.child(name), place.names[name])


def listed(place: Location) -> tuple[Mapping[str, Entry], str]:
    """Return the entries of a directory, and the reason why a local one, such as another user's, cannot be listed."""
    try:
        return place.names, ""
    except FailedError as error:
        check_answer(place, error)
        return {}, error.message


def check_answer(place: Location, error: Exception) -> None:
    """Raise an error again if a store did not answer, which shows nothing about its files. Here, a file may be gone, or
    another user's."""
    if isinstance(error, FailedError) and is_remote(place.path):
        raise error


def link_of(place: Location, name: str) -> str | None:
    """Return the name in the same directory that the link `name` leads to, "" if it leads elsewhere; None if that is no
    link."""
    if is_remote(place.path):
        return None
    try:
        leads = os.readlink(os.path.join(place.path, name))
    except OSError:
        return None
    directory, target = os.path.split(os.path.normpath(os.path.join(place.path, leads)))
    return target if directory == os.path.normpath(place.path) else ""
