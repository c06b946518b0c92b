"""Join, split and normalize paths and URLs as text. Nothing is opened."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, cast

from ckptconv.errors import UsageError
from ckptconv.storage.handles import resolved
from ckptconv.text import UNSET, parse_path

# One path, or several.
Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
# Characters that need no quoting in the path of a URL.
_PLAIN = "/~!$&'()*+,;=:@"
# The path that means standard input, and the name that it is read under; and paths of descriptors that were open
# before: a shell puts one in the place of <(...).
STANDARD_INPUT, STANDARD_INPUT_NAME = "-", "<stdin>"
_DESCRIPTOR = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/\d{1,9}")


_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*(::|://)")


def is_remote(path: str) -> bool:
    """Return whether `path` is a URL that fsspec opens; a file:// URL is not."""
    return bool(_URL.match(path)) and not path.startswith("file://")


def real_place(path: str) -> str:
    """Return `path` with a final symbolic link resolved: siblings are placed next to the directory, not the link."""
    path = path.rstrip("/") or path
    return resolved(path) if os.path.islink(path) else path


# Converts a path or URL from the user to the form in which every input and output is named.
normalize = parse_path


def listed(paths: Paths, none: str = "No path was given.") -> list[str]:
    """Return one path or several, normalized. Raise UsageError for another value, an empty path, or no path
    (`none`)."""
    several = isinstance(paths, Iterable) and not isinstance(paths, (str, bytes, os.PathLike))
    normalized = [normalize(path) for path in (cast("Iterable[str]", paths) if several else [cast("str", paths)])]
    if not normalized:
        raise UsageError(none)
    if not all(normalized):
        raise UsageError("A path is empty.", UNSET)
    return normalized


def join(directory: str, *names: str) -> str:
    """Join `names` to `directory`, a path or URL. In URLs of HTTP, names of files are quoted."""
    if is_remote(directory):
        before, place, after = _chained(directory)
        if is_quoted(place):
            from urllib.parse import quote

            names = tuple(quote(name, safe=_PLAIN) for name in names)
        return before + "/".join([place.rstrip("/") + "/" * place.endswith(("://", ":///")), *names]) + after
    return os.path.join(directory, *names)


def is_quoted(place: str) -> bool:
    """Return whether names of files are quoted in such a URL."""
    return place.startswith(("http://", "https://"))


def basename(path: str) -> str:
    """Return the name of the file or directory that a path or URL leads to."""
    if is_remote(path):
        from pathlib import PurePosixPath
        from urllib.parse import unquote

        place = _chained(path)[1]
        name = PurePosixPath(place.rstrip("/")).name
        return unquote(name) if is_quoted(place) else name
    return os.path.basename(os.path.normpath(path))


def dirname(path: str) -> str:
    if is_remote(path):
        before, place, after = _chained(path)
        return before + re.sub("(?<=:/)$", "/", place.rstrip("/").rpartition("/")[0]) + after
    return os.path.dirname(path) or "."


def _chained(url: str) -> tuple[str, str, str]:
    """Split a URL into three: the links before the one with the path, that link, without the query of one of HTTP, and
    the links after it.

    fsspec chains file systems, as in simplecache::s3://bucket/x.pt or zip://inner/x.pt::s3://bucket/all.zip.
    """
    links = url.split("::")
    at = next((index for index, link in enumerate(links) if "://" in link), 0)
    before, after = links[:at], links[at + 1 :]
    place = links[at].partition("?")[0] if is_quoted(links[at]) else links[at]
    return "".join(f"{link}::" for link in before), place, "".join(f"::{link}" for link in after)


def resolved_name(path: str) -> str:
    """Return the canonical form of a path or URL: a path with links resolved, a URL as its store spells it. Of chained
    file systems it is that of the file in which the others lie."""
    if not is_remote(path):
        return os.path.realpath(path)
    path = path.rpartition("::")[2]
    protocol, separator, inner = path.partition("://")
    if not separator:
        return os.path.realpath(path)
    if protocol in ("http", "https"):
        return path.rstrip("/")
    import fsspec

    # A package that is not installed reaches nothing: there is no other spelling either.
    with contextlib.suppress(ImportError, ValueError):
        kind = fsspec.get_filesystem_class(protocol)
        inner = str(kind._strip_protocol(path))
        protocol = kind.protocol if isinstance(kind.protocol, str) else kind.protocol[0]
    if protocol in ("file", "local"):
        return os.path.realpath(inner)
    # Some clients send "a/../b" as "b".
    return f"{protocol}://{posixpath.normpath(inner).strip('/')}"


def is_same(first: str, second: str) -> bool:
    """Return whether two paths or URLs name the same place."""
    return resolved_name(normalize(first)) == resolved_name(normalize(second))


def resolving() -> Callable[[str], str]:
    """Return `resolved_name` for many paths: a directory in which several lie is resolved once."""
    directories: dict[str, str] = {}

    def resolve(path: str) -> str:
        directory, name = os.path.split(path)
        if is_remote(path) or name in ("", ".", "..") or os.path.islink(path) or not os.path.lexists(path):
            return resolved_name(path)
        if directory not in directories:
            directories[directory] = os.path.realpath(directory)
        return os.path.join(directories[directory], name)

    return resolve


def is_pipe(path: str) -> bool:
    """Return whether `path` means standard input, or a pipe that this process was started with."""
    if path == STANDARD_INPUT:
        return True
    if not _DESCRIPTOR.fullmatch(path):
        return False
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
