"""Check records of files and manifests before anything uses them. Pure.

They are read from directories to which others may have written, or which came with a download. Anything that we would
not write raises ValueError, whose text is a sentence about "it".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ckptconv.options.kinds import ALGORITHMS
from ckptconv.outputs.computed import ways_in
from ckptconv.storage import strict_json
from ckptconv.storage.strict_json import OrNull, check

# A plan id, and the CRC-32 of a tensor as written in a manifest.
PLAN = re.compile(r"[0-9a-f]{16}")
_CRC = re.compile(r"[0-9a-f]{8}")
# A digest of one of `ALGORITHMS`: each has 32 bytes.
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Names in staging directories that are not output files.
_OF_STAGING = r"\.(lock|plan\.json|published\.json|ckptconv-manifest\.json)|\.record-[0-9a-f]{16}(\.[0-9a-f]+)?"

_HEADING = {
    "ckptconv": str,
    "plan": PLAN,
    "kind": str,
    "source": {
        "format": str,
        "family": str,
        "inputs": {str: {"size": OrNull(int), "identity": PLAN}},
        "model_rank?": int,
    },
    "options": dict,
    "aliases": {str: str},
    "digest?": frozenset(ALGORITHMS),
}
_DIGESTS = {"file": _DIGEST, "tensors": {str: _DIGEST}}
_FILES = {str: {"size": int, "tensors": {str: OrNull(_CRC)}, "digests?": _DIGESTS}}
_RECORD = {
    "name": str,
    "size": int,
    "plan": str,
    "spans": [(int, int, OrNull(int), OrNull(str))],  # start, length, CRC-32 and name
    "digests?": {**_DIGESTS, "algorithm": frozenset(ALGORITHMS)},
}


def parse_json(data: bytes) -> Any:
    """Parse JSON whose objects have no key twice. Raises ValueError for anything else.

    File names that are not UTF-8 contain halves of surrogate pairs.
    """
    try:
        return strict_json.parse(data.decode(), surrogates=True)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError unless each name occurs once, and leads to a file below the directory of the output."""
    for name, count in Counter(list(names)).items():
        if count > 1:
            raise ValueError(f"{name!r} occurs {count} times")
        if {"", ".", ".."}.intersection(name.split("/")) or "\0" in name or re.fullmatch(_OF_STAGING, name):
            raise ValueError(f"{name[:200]!r} is not the name of an output file")


def shape_of(heading: Any) -> dict[str, Any]:
    """Return the shape of a heading, with the members of the ways in which it was computed."""
    ways = ways_in(heading).values() if isinstance(heading, dict) else ()
    return {**_HEADING, **{name: shape for way in ways for name, shape in way.heading.items()}}


def check_heading(heading: Mapping[str, Any]) -> None:
    """Raise ValueError if the members of a heading contradict one another."""
    for way in ways_in(heading).values():
        way.check(heading)


def check_manifest(manifest: Any) -> None:
    """Raise ValueError unless `manifest` is one."""
    check(manifest, {**shape_of(manifest), "files": _FILES}, "it")
    check_heading(manifest)
    check_names(manifest["files"])
    for name, entry in manifest["files"].items():
        if ("digest" in manifest) != ("digests" in entry):
            raise ValueError(f"its entry for {name!r} {'lacks' if 'digest' in manifest else 'has'} 'digests'")
        _check_digests(entry, entry["tensors"])


def _check_digests(entry: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Raise ValueError unless the digests in `entry`, if there are any, are those of its `tensors`."""
    if "digests" in entry and entry["digests"]["tensors"].keys() != set(tensors):
        raise ValueError("its digests do not match its tensors")


def file_record(data: bytes) -> dict[str, Any]:
    """Parse the record of a file in a local staging directory."""
    return _record(data, {"inode": int, "mtime": int, "synced": bool})


def object_record(data: bytes) -> dict[str, Any]:
    """The record of a file that a part has put on a store: `version` identifies its object."""
    return _record(data, {"version": str})


def _record(data: bytes, facts: Mapping[str, type]) -> dict[str, Any]:
    entry: dict[str, Any] = check(parse_json(data), {**_RECORD, **facts}, "it")
    names = [name for *_, name in entry["spans"] if name is not None]
    for at, length, crc, _ in entry["spans"]:
        if at + length > entry["size"]:
            raise ValueError("one of its spans ends beyond the file")
        if crc is not None and crc >> 32:
            raise ValueError("one of its checksums is not valid")
    if len(set(names)) != len(names):
        raise ValueError("the name of a tensor occurs twice")
    _check_digests(entry, names)
    return entry
