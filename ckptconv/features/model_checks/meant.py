"""Decide whether it is clear which of several weights in a directory are meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os.path import splitext
from typing import NamedTuple

from ckptconv.errors import UsageError
from ckptconv.features.model_checks import FOLDER, STEP, WEIGHTS
from ckptconv.formats.model_files import SUFFIX
from ckptconv.formats.source import STEMS, Source
from ckptconv.formats.suggestions import is_checkpoint
from ckptconv.options.registered import several
from ckptconv.publish.earlier import Directory
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, is_remote, join
from ckptconv.storage.stores import is_repository
from ckptconv.text import some


class Told(NamedTuple):
    """Notes and warnings of a report about the weights that were read."""

    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


def _older(source: Source, read: str, steps: Sequence[str]) -> Iterator[str]:
    """Yield a warning if the file that was `read` is an earlier output of this program next to the `steps` of a run."""
    if steps and not is_remote(source.path) and Directory(Location(source.path, {})).made_as(read):
        yield (
            f"{join(source.path, read)}, an earlier output of ckptconv, was read instead of the steps in "
            f"{source.path}: {some([*map(basename, steps)], form=str)}. To convert a step, give its path."
        )


def told(source: Source, left: Mapping[str, str]) -> Told:
    """Return a note on the file that was read if `source` is a directory with one, whose name is not that of a model,
    and a warning if weights with the name of another library's model are among the files that were `left`, {path:
    reason}, or if an earlier output was read beside the steps of a run. Raise UsageError if weights among them are as
    likely to be meant.

    Weights of the same name are the same in another format. The report names other weights of a repository.
    """
    read = [name for name in source.inputs if name.endswith(SUFFIX)]
    weights = [path for path, why in left.items() if why == WEIGHTS]
    if any(name.startswith(STEMS) for name in read):
        # The reader of an index warns of the model in one file beside it.
        beside = {f"{source.stem}{SUFFIX}"} if source.shards else ()
        others = [path for path in weights if splitext(basename(path))[0] in STEMS and basename(path) not in beside]
        unread = some([*map(basename, others)], form=str)
        text = (
            f"{source.path} has weights of several libraries: {read[0]} was read, but not {unread}. Give the path of a "
            "file to "
        )
        warnings = [f"{text}convert it."] if others else []
        return Told(warnings=[*warnings, *_older(source, read[0], [path for path, why in left.items() if why == STEP])])
    if len(read) != 1 or is_repository(source.path):
        return Told()
    stem, _ = splitext(read[0])
    others = [path for path in weights if splitext(basename(path))[0] != stem]
    if others:
        raise UsageError(
            f"{source.path} contains several files of weights, and it is not clear which to convert: "
            f"{some([join(source.path, read[0]), *others], form=str)}.",
            f"Give one of them{several('. To convert several: {}') or '.'}",
        )
    folders = [path for path, why in left.items() if why == FOLDER and is_checkpoint(Location(path, {}))]
    verb = "is a checkpoint" if len(folders) == 1 else "are checkpoints"
    how = "To convert it, give its path." if len(folders) == 1 else "To convert one of them, give its path."
    warnings = [f"{some(folders, form=str)} {verb} too, but not read. {how}"] if folders else []
    return Told([f"The weights are those of {join(source.path, read[0])}."], warnings)
