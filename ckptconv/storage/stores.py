"""URLs: the feature that reads and writes them, and the features for single schemes.

A line stays where its feature is missing: URLs of its scheme are then refused by name, not read or written like any
others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptconv.process import needed, of_feature
from ckptconv.storage.paths import is_remote

# The feature for each scheme, whose `store.py` has `STORE`.
STORES: Mapping[str, str] = {
    "hf": "hub",
    "http": "http",
    "https": "http",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "gs": "gcs",
    "gcs": "gcs",
    "s3": "s3",
    "s3a": "s3",
}
# The feature for URLs of all schemes, on which those build: `reaching` in its folder says how a URL is listed, read and
# written.
REMOTE = "remote"

# Called with a sentence about each long wait for a server, from any thread.
on_wait: Callable[[str], None] = lambda text: None  # noqa: E731


def reached(url: str) -> Any:
    """Return the module that lists, reads and writes URLs. Raise UsageError, which names `url`, if it is missing."""
    return needed(REMOTE, "reaching", f"{url}: a URL")


def pinned(path: str, options: Mapping[str, Any]) -> str:
    """Return the URL of the present version at `path`, which later changes do not move; a path as it is."""
    return str(reached(path).at(path).pinned(path, options)) if is_remote(path) else path


def plain(path: str) -> str:
    """Return a URL without its version; a path as it is."""
    return str(reached(path).at(path).plain(path)) if is_remote(path) else path


def is_repository(path: str) -> bool:
    """Return whether files next to each other at `path` are one model, which a framework loads by one name."""
    return is_remote(path) and bool(reached(path).at(path).repository)


def hint(path: str, options: Mapping[str, Any]) -> str:
    """Return advice for a path that does not exist, if a store knows what is meant, or what is missing; else ""."""
    reaching = of_feature(REMOTE, "reaching")
    return str(reaching.hint(path, options)) if reaching else ""
