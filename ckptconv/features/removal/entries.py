"""An entry of a directory: all files in it, by open directories, and its mark, which tells it from any other entry."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping

from ckptconv.errors import UnsafeError
from ckptconv.storage.handles import Handle
from ckptconv.storage.reading import Entry

# The greatest depth of the files of an entry.
_DEEPEST = 32
LINKS, PROTECTED = "contains symbolic links", "contains a directory that cannot be written to"
MOUNTED = "has a file system mounted in it"


class StrangeError(UnsafeError):
    """A step has something in it that is never removed: `why` says what."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} {why}. It was left in place.")
        self.why = why


def entries_of(home: Handle, name: str) -> dict[str, os.stat_result]:
    """Return all directories and files of the entry `name` of a run, itself among them, by their paths in the run.

    Raise StrangeError if there is anything else among them, or another file system, or a part of this one that is
    mounted there.
    """
    entries: dict[str, os.stat_result] = {}
    _walk(home, name, "", os.fstat(home.fd).st_dev, entries, _DEEPEST)
    if any(f"{place}/".startswith(f"{name}/") for place in _mounted(home)):
        raise StrangeError(os.path.join(home.path, name), MOUNTED)
    return entries


def _mounted(home: Handle) -> Iterator[str]:
    """Yield the places in a directory where something is mounted, by their paths in it: on Linux, as proc(5) says."""
    try:
        root = f"{os.readlink(f'/proc/self/fd/{home.fd}').rstrip('/')}/"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            places = [line.split(" ")[4] for line in lines]
    except OSError:
        return
    for escaped in places:
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped)
        if place.startswith(root):
            yield place.removeprefix(root)


def _walk(place: Handle, name: str, prefix: str, device: int, entries: dict[str, os.stat_result], deepest: int) -> None:
    entry, path = place.stat(name), f"{prefix}{name}"
    if stat.S_ISLNK(entry.st_mode):
        raise StrangeError(os.path.join(place.path, name), LINKS)
    if entry.st_dev != device or not deepest:
        raise StrangeError(os.path.join(place.path, name), "is on another disk, or nested too deeply")
    entries[path] = entry
    if stat.S_ISDIR(entry.st_mode):
        with place.inside(name) as inner:
            entries[path] = entry = os.fstat(inner.fd)
            if entry.st_dev != device:
                raise StrangeError(inner.path, "is on another disk, or nested too deeply")
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=inner.fd, effective_ids=True):
                raise StrangeError(inner.path, PROTECTED)
            for below in inner.names():
                _walk(inner, below, f"{path}/", device, entries, deepest - 1)
    elif not stat.S_ISREG(entry.st_mode):
        raise StrangeError(os.path.join(place.path, name), "contains more than regular files and directories")


def mark_of(entries: Mapping[str, os.stat_result]) -> str:
    """Return the mark that tells an entry from any other, and from itself with other contents: its identity on the
    disk, and the sizes and times of all files in it."""
    top = next(iter(entries))
    lines = [
        f"{path[len(top) :]} {_identity(entry)} {(entry.st_size, entry.st_mtime_ns) if _is_file(entry) else 0}\n"
        for path, entry in sorted(entries.items())
    ]
    digest = hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()
    return f"{_identity(entries[top])} {digest}"


def is_entry(home: Handle, name: str, mark: str) -> bool:
    """Return whether the entry with this `mark` (of `mark_of`) is there, whatever its contents are now."""
    return home.has(name) and mark.startswith(f"{_identity(home.stat(name))} ")


def _identity(entry: os.stat_result) -> str:
    return f"{entry.st_dev}:{entry.st_ino}"


def agrees(entries: Mapping[str, os.stat_result], judged: Mapping[str, Entry]) -> bool:
    """Return whether the files among the entries of a step are those that were judged: by names, sizes and times."""
    files = {path: entry for path, entry in entries.items() if _is_file(entry)}
    return files.keys() == judged.keys() and all(
        (file.st_size, file.st_mtime) == (judged[path].file.size, judged[path].time) for path, file in files.items()
    )


def _is_file(entry: os.stat_result) -> bool:
    return stat.S_ISREG(entry.st_mode)
