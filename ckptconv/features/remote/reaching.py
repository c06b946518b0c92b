"""The trunk's access to URLs: entries, listings, readers, and the staging of outputs."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptconv.features.remote import access
from ckptconv.features.remote.files import RemoteReader, listing, look
from ckptconv.features.remote.stores import at, meant
from ckptconv.formats.model_files import INDEX, holds_whole
from ckptconv.text import some

if TYPE_CHECKING:
    from ckptconv.features.remote.needs import Needs
    from ckptconv.features.remote.prefetch import Prefetch, Task
    from ckptconv.features.remote.staging import UploadStaging
    from ckptconv.formats.source import Source
    from ckptconv.storage.files import Readers
    from ckptconv.storage.location import Location
    from ckptconv.storage.reading import Range

__all__ = ["RemoteReader", "at", "listing", "look"]


def taken(url: str, options: Mapping[str, Any], directory: str) -> None:
    """Download a file whose store has no ranges to a temporary file in `directory`, to which its URL then refers."""
    at(url).taken(url, options, directory)


def hint(path: str, options: Mapping[str, Any]) -> str:
    """Return advice for a path that leads nowhere: the URL that is meant, its missing bucket, or a similar name in its
    directory or archive; "" for none."""
    meaning = meant(path)
    if meaning:
        return f"If it is {meaning.kind}, specify {meaning.url}."
    bucket, is_archive = at(path).bucket, path.startswith(("tar://", "zip://"))
    if bucket or is_archive or (path.startswith(("http://", "https://")) and "?" not in path):
        with contextlib.suppress(Exception):
            fs, inner = access.filesystem(path, options)
            name = inner.partition("/")[0]
            if bucket and access.info(fs, name) is None:
                return f"There is no {bucket} {name}, or these credentials cannot access it."
            inner = inner.rstrip("/")
            parent = inner.rpartition("/")[0]
            # Not tried again: it is for a hint.
            rows = () if is_archive else at(path).call(fs, "ls", parent, detail=True)
            names = fs.find("") if is_archive else [row["name"].rstrip("/") for row in rows]
            # In a long path, another file is similar too.
            end = inner.rpartition("/")[2]
            names = [name for name in names if difflib.get_close_matches(name.rpartition("/")[2], [end], cutoff=0.8)]
            if close := difflib.get_close_matches(inner, names, n=1, cutoff=0.8):
                return f"Did you mean {path.replace(inner, close[0], 1)}?"
    return ""


def notes_on(place: Location, source: Source) -> Iterator[str]:
    """Yield the revision of the repository from which `source` was read, and the other weights in it."""
    yield f"Read {place}."
    names = place.names if place.kind == "directory" else ()
    weights = (name for name in names if holds_whole((name,)) and not name.endswith(INDEX))
    if left := [name for name in weights if name not in source.inputs]:
        others = some(left, form=str)
        yield (
            f"It also contains other weights, which were not read: {others}. To convert one of these files, "
            "specify its name."
        )


def check_writable(url: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise UsageError for a URL with a scheme that cannot be written to."""
    from ckptconv.features.remote import uploads

    uploads.check_writable(url, options)


def needs(unit: int) -> Needs:
    """Return the function that gives the ranges read by a task of the engine whose buffers have `unit` bytes."""
    from ckptconv.features.remote.needs import Needs

    return Needs(unit)


def prefetching(readers: Readers, needs: Callable[[Task], Iterable[Range]], **settings: Any) -> Prefetch[Task]:
    """Return readers that fetch the ranges of coming tasks."""
    from ckptconv.features.remote.prefetch import Prefetch

    return Prefetch(readers, readers.spool, needs, **settings)


def staging(
    place: Location,
    plan_id: str,
    memory: int,
    index: str,
    is_ours: Callable[[str], bool] | None,
    *,
    tree: bool,
    shared: bool,
    shards: tuple[str, ...] | None,
) -> UploadStaging:
    """Return the staging of an output: of one file, or of a directory with an `index`.

    `tree`: the index is next to a tree of files. `shards`: several processes make it, and these are the endings of the
    names of its large files; None: one process.
    """
    from ckptconv.features.remote.parts import PartsOnStore, TreeOnStore
    from ckptconv.features.remote.staging import UploadStaging

    if tree:
        return TreeOnStore(place, plan_id, memory, index, shared)
    if shards is not None and is_ours:
        return PartsOnStore(place, plan_id, memory, index, is_ours, shared, shards)
    return UploadStaging(place, plan_id, memory, index, is_ours)


def notes(files: Iterable[tuple[str, int]], memory: int) -> list[str]:
    """Return notes on the files, given as name and size, that are sent to stores with `memory` bytes of buffers."""
    from ckptconv.features.remote import staging as uploading

    return uploading.notes(files, memory)


def directories(place: Location) -> list[str]:
    """Return the names of the directories in `place`, sorted."""
    from ckptconv.features.remote import staging as uploading

    return uploading.directories(place)


def content_of(place: Location, most: int) -> bytes | None:
    """Return the content of `place`, at most `most` bytes; None if it is missing."""
    from ckptconv.features.remote import parts

    return parts.content_of(place, most)
