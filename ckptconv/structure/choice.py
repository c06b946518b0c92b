"""Choose names by globs."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence


class Choice:
    """The names that match a glob of `include`, if there is any, and no glob of `exclude`.

    `used` are the globs that have matched a name so far.
    """

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        self.include = tuple(include)
        self.exclude = tuple(exclude)
        self.used: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude)

    def __contains__(self, name: str) -> bool:
        return not self.excludes(name) and (not self.include or self.includes(name))

    def includes(self, name: str) -> bool:
        """Return whether `name` matches a glob of `include`."""
        return self._any(name, self.include)

    def excludes(self, name: str) -> bool:
        """Return whether `name` matches a glob of `exclude`."""
        return self._any(name, self.exclude)

    def _any(self, name: str, patterns: Sequence[str]) -> bool:
        if not patterns:
            return False
        matching = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)]
        self.used.update(matching)
        return bool(matching)
