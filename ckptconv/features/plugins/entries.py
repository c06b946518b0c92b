"""Formats of other packages, by the entry-point group `ckptconv.formats`.

They are looked up only if none of our formats recognizes a path, or if a caller names one: importlib.metadata is slow
to import. An exception in one becomes an error message that names its package.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ckptconv.errors import CkptconvError, FailedError, UsageError
from ckptconv.formats.format import CERTAIN, Format, Guess, Probe
from ckptconv.formats.source import Source, Wanted
from ckptconv.storage.location import Location

GROUP = "ckptconv.formats"
# The plugins that have read a checkpoint in this process, and their packages: they may cause later failures.
_used: dict[str, str] = {}
# The command that accepts files of a format that has no command of its own.
_COMMAND_OF = "torch"


class _Plugin:
    """A format of another package, under the name of its entry point."""

    def __init__(self, entry: EntryPoint) -> None:
        self.FAMILY = entry.name
        self._package = entry.dist.name if entry.dist else entry.value
        self._format = self._called("load", entry.load)
        for method in ("sniff", "read"):
            if not callable(getattr(self._format, method, None)):
                raise self._broken(f"it has no {method}")

    def sniff(self, probe: Probe) -> Guess | None:
        guess = self._called("sniff", self._format.sniff, probe)
        if guess is None:
            return None
        if not isinstance(guess, Guess):
            raise self._broken(f"its sniff must return a Guess, not {type(guess).__name__}")
        for name, value, kind in (
            ("sure", guess.sure, int),
            ("called", guess.called, str),
            ("command", guess.command, str),
        ):
            if not isinstance(value, kind):
                raise self._broken(f"{name} of its Guess must be {kind.__name__}, not {type(value).__name__}")
        sure = CERTAIN if probe.expected == self.FAMILY else guess.sure
        return guess._replace(sure=sure, also=(*guess.also, _COMMAND_OF))

    def read(self, place: Location, wanted: Wanted) -> Source:
        source = self._called("read", self._format.read, place, wanted)
        if not isinstance(source, Source):
            raise self._broken(f"its read must return a Source, not {type(source).__name__}")
        _used[self.FAMILY] = self._package
        return source._replace(family=self.FAMILY)

    def _called(self, step: str, call: Any, *arguments: object) -> Any:
        try:
            return call(*arguments)
        except (CkptconvError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            raise self._broken(f"{step} fails with {type(error).__name__}: {error}") from error

    def _broken(self, why: str) -> FailedError:
        return FailedError(
            f"The format {self.FAMILY!r} of the package {self._package} cannot be used: {why}.",
            "Update that package, or uninstall it.",
        )


def installed() -> Iterator[Format]:
    """Yield the formats of all installed packages, each imported when its turn comes."""
    for entry in entry_points(group=GROUP):
        yield _Plugin(entry)


def named(family: str) -> Format:
    """Return the format with this name."""
    for entry in entry_points(group=GROUP, name=family):
        return _Plugin(entry)
    raise UsageError(f"The format {family!r} is not known.", "Its package is not installed, or the name is wrong.")


def suspects() -> list[str]:
    """Return the packages whose formats have read a checkpoint in this process, in words."""
    return [f"the package {_used[name]}, which provides the format {name!r}" for name in sorted(_used)]
