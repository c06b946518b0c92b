"""Compares the companions in an output with their originals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptconv.errors import DifferenceError
from ckptconv.features.companions.contents import content
from ckptconv.features.companions.copying import of_other_weights
from ckptconv.features.companions.reading import together, with_files
from ckptconv.features.pairs.runs import ExpectedPair
from ckptconv.features.verify.output import Written
from ckptconv.features.verify.report import CheckedOutput
from ckptconv.formats.registered import is_companion_name
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.notices import Change
from ckptconv.storage.paths import join
from ckptconv.tensors.lazy import whole

_AGAIN = "The copy or its source changed after the conversion; convert again."


def with_copied(source: Source, target: CheckedOutput, options: Options) -> Source:
    """Return `source` with the companions of the names that `target` has, or is to have."""
    names = _copied(source, target, options)
    files = together(source, target.place.options, names) if names else {}
    return with_files(source, files, target.place.options)


def compared(
    source: Source, target: CheckedOutput, written: Written, options: Options, change: Change
) -> Iterator[ExpectedPair]:
    """Yield the companions in `target`, and their originals; add them to the files of `written`."""
    for name in _copied(source, target, options):
        path = join(target.path, name)
        entry = target.place.at(target.at[name] if target.at else path).entry
        if entry.kind != "file" or name not in source.companions:
            where = target.path if entry.kind != "file" else f"{source.path}, the source of the copy,"
            raise DifferenceError(f"{where} lacks {name}.", _AGAIN, what="missing", file=path)
        written.files.append(entry.file._replace(path=path))
        want, got = content(source, name, source.companions[name], change), whole(entry.file)
        if want.shape != got.shape:
            raise DifferenceError(
                f"{path} has {entry.file.size} bytes, but {source.companions[name].path} has {want.nbytes}.",
                _AGAIN,
                what="file",
                file=path,
                expected=want.nbytes,
                found=entry.file.size,
            )
        yield ExpectedPair(want, got, path, name)


def _copied(source: Source, target: CheckedOutput, options: Options) -> list[str]:
    """Return the names of the files of `target` that were copied whole: all files if it is staged; otherwise those in
    its manifest. If it was to have none, these are all that are present, and all that a conversion copies."""
    names: Iterable[str] = target.at or (target.manifest.members["files"] if target.manifest else ())
    if options.for_hub and options.asked("copy_config") and not names and target.place.kind == "directory":
        copied = together(source, target.place.options).keys() - of_other_weights(source, options)
        names = sorted({*target.place.names, *copied})
    return list(filter(is_companion_name, names))
