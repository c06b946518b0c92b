"""Why a directory lacks the file that describes its others."""

from __future__ import annotations

from importlib import import_module

from ckptconv.errors import CkptconvError, CorruptError
from ckptconv.features.dcp.locate import BEGINNING, is_metadata
from ckptconv.features.dcp.names import METADATA, SUFFIX
from ckptconv.formats import model_files
from ckptconv.formats.registered import FOREIGN
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.storage.reading import Entry

# Files that are searched for metadata under another name, at most.
_TRIED = 32


def not_described(directory: Location) -> CkptconvError:
    """Return the error for a directory without metadata. Raise it if another program's files are known by it."""
    names = directory.names
    for module in FOREIGN:
        import_module(module).check_directory(directory, names)
    if f"{METADATA}.tmp" in names:
        return CorruptError(
            f"{directory} has {METADATA}.tmp, but no {METADATA}, which is written last: the save was interrupted.",
            "Take another checkpoint.",
        )
    parts = sum(name.endswith(SUFFIX) for name in names)
    likely = sorted(names, key=lambda name: ("metadata" not in name, name))[:_TRIED]
    renamed = next((name for name in likely if _describes(directory, names[name])), "")
    if renamed:
        return CorruptError(
            f"{directory} has {parts} {SUFFIX} files, but no {METADATA} that describes them: {renamed} is a renamed "
            f"{METADATA}.",
            f"Rename {renamed} to {METADATA}.",
        )
    return CorruptError(
        f"{directory} has {parts} {SUFFIX} files, but no {METADATA} that describes them: it was not copied, or the "
        "save was interrupted.",
        f"Copy {METADATA} too: its name begins with a dot, so a pattern such as * does not match it.",
    )


def _describes(place: Location, entry: Entry) -> bool:
    """Return whether a file is the metadata of a checkpoint, under any name."""
    if entry.kind != "file" or basename(entry.file.path).endswith((SUFFIX, model_files.SUFFIX)):
        return False
    with place.at(entry.file).open_reader() as reader:
        return is_metadata(reader.read_at(0, min(reader.file.size, BEGINNING)))
