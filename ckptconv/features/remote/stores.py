"""The ways in which stores are special.

A store is a feature: `store.py` in its folder has `STORE`, and is imported for the first URL of its scheme. What it
leaves out is done as for any other scheme that fsspec opens (`access`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ckptconv.process import lacking, of_feature
from ckptconv.storage.stores import STORES

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

Options = Mapping[str, Any]
# Takes the number of bytes that came before, and the bytes that came.
Put = Callable[[int, bytes], None]
# Reads bytes `start` to `stop` of a file with one request, and passes them on as they come.
Ranges = Callable[[int, int, Put], None]


class Meant(NamedTuple):
    """The URL that a user means by other text, and the kind of thing that it names: "a repository of …"."""

    kind: str
    url: str


class Store(NamedTuple):
    """The special ways of a store. `fs` is its file system of fsspec, and `inner` a path inside it.

    - `extra` is the extra of this package with the packages that fsspec needs.
    - `call` calls the method "info" or "ls" of `fs`. `fixed`: the entry at `inner` never changes.
    - `ranges` returns how ranges of a file of a size, and of the version that `access.stamp` returned, are read;
      `parallel`: several may be read at a time. None: as fsspec reads them.
    - `pinned` returns the URL of a URL's present version; `plain` that URL without the version. `repository`: files
      that lie together there belong together, as a framework loads them by one name.
    - `meant` returns the URL of this store that other text means.
    - `bucket` is what the first name of a path is called, if all its files are in such.
    - `taken` reads a file that has no ranges into a temporary file in a directory, which its URL then stands for.
    - `upload` begins the `uploads.Upload` of a file of a size, in parts of some bytes. None: files are written under
      hidden names and renamed. `instead` is the advice where a store takes no outputs.
    - `swept` removes the remains of killed processes' uploads to outputs whose paths begin with `inner`.
    """

    extra: str = ""
    call: Callable[..., Any] = lambda fs, method, inner, **settings: getattr(fs, method)(inner, **settings)
    fixed: Callable[[str], bool] = lambda inner: False
    ranges: Callable[[Any, str, int, str], Ranges] | None = None
    parallel: bool = False
    pinned: Callable[[str, Options], str] = lambda url, options: url
    plain: Callable[[str], str] = lambda url: url
    repository: bool = False
    meant: Callable[[str], Meant | None] = lambda text: None
    bucket: str = ""
    taken: Callable[[str, Options, str], object] = lambda url, options, directory: None
    upload: Callable[[Any, str, int, int], Any] | None = None
    instead: str = ""
    swept: Callable[[Any, str], None] = lambda fs, inner: None


_ANY = Store()


def at(path: str) -> Store:
    """Return the store of a URL, or of a path, which has nothing special. Raise UsageError if its feature is missing.

    File systems that are chained are those of fsspec.
    """
    match = _SCHEME.match(path)
    return of_scheme(match[1], path) if match else _ANY


def of_scheme(scheme: str, url: str = "") -> Store:
    """Return the store of a scheme. Raise UsageError, which names `url`, if its feature is missing."""
    if scheme not in STORES:
        return _ANY
    store = _of_feature(STORES[scheme])
    if store is None:
        raise lacking(f"{url or scheme}: {scheme}://", STORES[scheme])
    return store


def of(fs: Any) -> Store:
    """Return the store that a file system of fsspec reaches."""
    return next((of_scheme(name) for name in protocols(fs) if name in STORES), _ANY)


def protocols(fs: Any) -> tuple[str, ...]:
    """Return the protocols of a file system in URLs."""
    named = fs.protocol
    return (named,) if isinstance(named, str) else tuple(named)


def meant(text: str) -> Meant | None:
    """Return the URL that is meant by `text`, which leads nowhere by itself; None if no store knows."""
    every = (_of_feature(name) for name in dict.fromkeys(STORES.values()))
    return next((meaning for store in every if store and (meaning := store.meant(text))), None)


def _of_feature(name: str) -> Store | None:
    module = of_feature(name, "store")
    return module.STORE if module else None
