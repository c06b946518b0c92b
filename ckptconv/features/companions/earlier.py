"""Companions that an earlier output copied to a directory: this program may replace and remove them."""

from __future__ import annotations

from collections.abc import Collection

from ckptconv.formats.registered import is_companion_name
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.targets import Target
from ckptconv.publish.earlier import Directory
from ckptconv.storage.location import Location
from ckptconv.text import some


def copied_earlier(directory: Location) -> Collection[str]:
    """Return the names of companions that an earlier output copied to `directory`, and that are unchanged."""
    there = Directory(directory)
    return {name for name in there.names if is_companion_name(name) and there.made_as(name)}


def told_of_removal(source: Source, target: Target, options: Options) -> Source:
    """Return `source` with a note on the companions that an earlier output copied to `target`, and that are removed
    there because this one copies none of these names; a warning, if no option says so."""
    removed = sorted(target.replaces - source.companions.keys())
    text = f"removed from {target.path}: {some(removed, len(removed), str)}, which an earlier conversion had copied"
    if options.asked("copy_config") is None and not source.companions:
        return source._replace(warnings=[*source.warnings, f"{text}. --copy-config copies these files again."])
    return source._replace(notes=[*source.notes, f"{text}."])
