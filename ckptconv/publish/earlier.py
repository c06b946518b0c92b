"""Recognize earlier files of this program: by marks, by manifests and records, and by form.

A kind of file is named as in `Output.made_as`: "weights", "weights/average", "universal", and for files next to
outputs: "manifest", "attest", "page", and those of features.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from ckptconv.errors import CkptconvError
from ckptconv.formats.model_files import METADATA, looks_like_safetensors
from ckptconv.outputs.computed import made_as
from ckptconv.outputs.targets import MANIFEST
from ckptconv.publish.staging.area import MOST_RECORD, is_sibling, record_of
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.marks import CHANGED, marked
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import Entry, Reader

# The kind of files from a run that was killed while it published: their records do not state any.
UNFINISHED = "unfinished"
# Bytes of the beginning of a file in which its form shows.
_HEAD = 4096
# The prefix of the keys of this program's records in metadata.
_RECORDS = "ckptconv."


class Directory:
    """A directory, and the files in it that this program wrote."""

    def __init__(self, place: Location) -> None:
        self.place = place
        self.names: Mapping[str, Entry] = place.names if place.kind == "directory" else {}

    def made_as(self, name: str) -> str:
        """Return the kind of the file `name`, which may be below subdirectories, if this program wrote it; "" if it did
        not, or if the file was changed since."""
        entry = self._entry(name)
        if entry.kind != "file":
            return ""
        path = entry.file.path
        if not is_remote(path):
            if os.path.islink(path):
                return ""
            if mark := marked(path):
                return "" if mark == CHANGED else mark
        return self._of_manifest(name, entry) or self._of_records(name, entry)

    def _entry(self, name: str) -> Entry:
        *above, last = name.split("/")
        place = functools.reduce(Location.child, above, self.place)
        return place.names[last]

    def _of_manifest(self, name: str, entry: Entry) -> str:
        stated = self.manifest
        listed = stated["files"].get(name) if stated else None
        if stated is None or listed is None or listed["size"] != entry.file.size:
            return ""
        if is_remote(entry.file.path):
            return made_as(stated)  # stores do not tell times in a common form
        manifest = self.names[MANIFEST].file
        # If the manifest has its mark, so had all files that were written with it.
        is_as_written = not marked(manifest.path) and int(entry.file.stamp, 16) <= int(manifest.stamp, 16)
        return made_as(stated) if is_as_written else ""

    @functools.cached_property
    def manifest(self) -> Mapping[str, Any] | None:
        """The manifest in the directory; None if it has no valid one."""
        if MANIFEST not in self.names or self.names[MANIFEST].kind != "file":
            return None
        return _json(self.place.join(MANIFEST), _manifest)

    def _of_records(self, name: str, entry: Entry) -> str:
        """Return UNFINISHED for a file to which a run of ours that has not ended has given its final name."""
        from ckptconv.outputs.schema import file_record, object_record

        for staging in self._stagings():
            is_far = is_remote(staging.path)
            record = _json(staging.join(record_of(name)), object_record if is_far else file_record)
            stamp = record and (record["version"] if is_far else f"{record['mtime']:x}")
            if record and (record["name"], record["size"], stamp) == (name, entry.file.size, entry.file.stamp):
                return UNFINISHED
        return ""

    @functools.cached_property
    def is_being_made(self) -> bool:
        """Whether files may have their final names before all of the output's files do: on a store, in an unfinished
        run of ours."""
        return is_remote(self.place.path) and any(staging.names for staging in self._stagings())

    def _stagings(self) -> Iterator[Location]:
        for token, entry in self.names.items():
            if entry.kind == "directory" and is_sibling(token, HIDDEN):
                yield self.place.child(token)


def _json(place: Location, parse: Callable[[bytes], Any]) -> dict[str, Any] | None:
    """Return a small file as `parse` reads it; None if it is missing, or not valid."""
    try:
        parsed: dict[str, Any] = parse(place.read_text(MOST_RECORD).encode(errors="surrogatepass"))
    except (CkptconvError, ValueError):
        return None
    return parsed


def _manifest(data: bytes) -> dict[str, Any]:
    from ckptconv.outputs.schema import check_manifest, parse_json

    manifest: dict[str, Any] = parse_json(data)
    check_manifest(manifest)
    return manifest


def file_made_as(place: Location, kind: str) -> str:
    """Return the kind of the file at `place` if this program wrote it; "" if that is not known, CHANGED if the file was
    changed since. A file without a mark is of the given `kind` if it has its form."""
    if not is_remote(place.path) and (mark := marked(place.path)):
        return mark
    base = kind.partition("/")[0]
    form = import_module(_OF_FEATURES[base]).is_ours if base in _OF_FEATURES else _FORMS.get(base)
    if form is None or place.kind != "file":
        return ""
    with place.open_reader() as reader:
        return base if form(reader) else ""


def _head(reader: Reader) -> bytes:
    return reader.read_at(0, min(reader.file.size, _HEAD))


def _has_record(reader: Reader) -> bool:
    """Return whether a file is safetensors with a record of this program's in its metadata."""
    head = _head(reader)
    if not looks_like_safetensors(head, reader.file.size):
        return False
    try:
        from ckptconv.outputs.schema import parse_json

        header = parse_json(reader.read_at(8, int.from_bytes(head[:8], "little")))
    except ValueError:
        return False
    metadata = header.get(METADATA) if isinstance(header, dict) else None
    return isinstance(metadata, dict) and any(key.startswith(_RECORDS) for key in metadata)


def _prefixed(*beginnings: bytes) -> Callable[[Reader], bool]:
    return lambda reader: _head(reader).startswith(beginnings)


# Functions that recognize the form of a file, by its kind.
_FORMS: dict[str, Callable[[Reader], bool]] = {
    "weights": _has_record,
    "optimizer": _has_record,
    "rows": _has_record,
    "manifest": _prefixed(b'{\n "ckptconv": ', b'{"outputs": [\n{\n "ckptconv": '),
    "page": lambda reader: b'<meta name="generator" content="ckptconv">' in _head(reader),
}
# Modules of the files that features write. Their `is_ours(reader)` is whether this program wrote one.
_OF_FEATURES: dict[str, str] = {
    "attest": "ckptconv.features.provenance.attesting",
    "depfile": "ckptconv.features.depfile.rule",
    "sarif": "ckptconv.features.scan.sarif",
    "virtual": "ckptconv.features.virtual.output",
}
