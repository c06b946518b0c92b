"""Check names of files that a file contains: the shards of an index, the paths in a `.metadata`, the tag in `latest`.

Each has to name something below the directory of the file that contains it, for every reader: this program, another
system, a server, or a proxy before that. Pure.
"""

from __future__ import annotations

import re

from ckptconv.errors import UnsafeError
from ckptconv.storage.paths import is_remote
from ckptconv.text import is_unicode

_LONGEST = 200
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DRIVE = re.compile(r"[A-Za-z]:")
# Characters and escapes that do not stand for themselves in a URL.
_OF_URLS = re.compile(r"[?#]|%[0-9A-Fa-f]{2}")


def leads_out(name: str, directory: str = "") -> str:
    """Return in words why `name` may not be looked for below `directory`; "" if it may.

    More characters are refused if `directory` is a URL, where they have a meaning.
    """
    parts = name.split("/")
    if not name.strip():
        return "it is empty"
    if _CONTROL.search(name) or not is_unicode(name):
        return "it contains characters that are not allowed in names"
    if not parts[0] or _DRIVE.match(name):
        return "it is an absolute path"
    if "\\" in name or "::" in name or "://" in name:
        return "it is a URL, or a path of another operating system"
    if ".." in parts:
        return "it refers to a place outside the directory"
    if is_remote(directory) and _OF_URLS.search(name):
        return "a part of it has a special meaning in a URL"
    return ""


def check_inside(name: str, where: str, directory: str, *, nested: bool = True) -> None:
    """Raise UnsafeError unless `name`, which `where` contains, is below `directory`; right in it if not `nested`."""
    why = leads_out(name, directory)
    if not why and not nested and (name == "." or "/" in name):
        why = "it is a path"
    if why:
        raise UnsafeError(
            f"{where} refers to {name[:_LONGEST]!r}, which is outside its directory or not a valid path: {why}. No "
            "honest checkpoint does that, and the path was not read.",
            "Do not trust the source of this checkpoint.",
        )
