"""Check descriptions of parts, records of files and manifests before anything uses them. Pure.

They are read from directories to which others may have written, or which came with a download. Anything that we would
not write raises ValueError, whose text is a sentence about "it".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.formats.source import STEMS
from ckptconv.options.kinds import ALGORITHMS
from ckptconv.outputs.computed import ways_in
from ckptconv.plan import NUMBERED
from ckptconv.storage import strict_json
from ckptconv.storage.strict_json import OrNull, check

if TYPE_CHECKING:
    from ckptconv.outputs.targets import Directory

# At most so many bytes are read. A record has a line for every tensor of a file.
MOST_DESCRIPTION, MOST_RECORD = 32 << 20, 256 << 20
MOST_PARTS = 10**9 - 1

# A plan id, and the CRC-32 of a tensor as written in a manifest.
PLAN = re.compile(r"[0-9a-f]{16}")
_CRC = re.compile(r"[0-9a-f]{8}")
# A digest of one of `ALGORITHMS`: each has 32 bytes.
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHARD = rf"(?:{'|'.join(STEMS)}){NUMBERED}\.safetensors"
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
_DESCRIPTION = {
    "plan": PLAN,
    "kind": str,
    "parts": int,
    "shift": int,
    "files": [(str, int, int)],  # name, size and number of tensors
    "inputs?": {str: (str, int, str)},  # path, size and stamp
    "permissions?": [str],
}
_RECORD = {
    "name": str,
    "size": int,
    "plan": str,
    "spans": [(int, int, OrNull(int), OrNull(str))],  # start, length, CRC-32 and name
    "digests?": {**_DIGESTS, "algorithm": frozenset(ALGORITHMS)},
}


class PlanDescription(NamedTuple):
    """The description of a plan for `finish`.

    `kind` is that of the output, as `Target.form` has it. The files were assigned to `parts` parts with `shift`,
    as in `publish.parts.assign`. `heading` is that of the manifest. `files` are (name, size in bytes, number of
    tensors). `inputs` are its input files: [path, size in bytes, stamp] by name. `permissions` name the files that it
    may replace, as `publish.replacing.Claim` has them.
    """

    plan_id: str
    kind: str
    parts: int
    shift: int
    heading: dict[str, Any]
    files: list[tuple[str, int, int]]
    inputs: dict[str, list[Any]]
    permissions: list[str]


def parse_json(data: bytes) -> Any:
    """Parse JSON whose objects have no key twice. Raises ValueError for anything else.

    File names that are not UTF-8 contain halves of surrogate pairs.
    """
    try:
        return strict_json.parse(data.decode(), surrogates=True)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def description(
    data: bytes, plan_id: str, kinds: Collection[str], directory_of: Callable[[str], Directory | None]
) -> PlanDescription:
    """Parse the description of a plan, read from a staging directory of `plan_id`, of an output of one of `kinds`.

    `directory_of` returns which kind of directory an output of a kind is, None if it is another.
    """
    parsed = parse_json(data)
    heading = parsed.get("heading") if isinstance(parsed, dict) else None
    members = check(parsed, {**_DESCRIPTION, "heading": _shape_of(heading)}, "it")
    kind, parts = members["kind"], members["parts"]
    if members["plan"] != plan_id or kind not in kinds:
        raise ValueError(f"it is not of the plan {plan_id}, or of another kind of output than {' or '.join(kinds)}")
    if not 0 < parts <= MOST_PARTS:
        raise ValueError(f"it has {parts} parts")
    _check_heading(members["heading"])
    if members["heading"]["plan"] != plan_id:
        raise ValueError("its heading belongs to another plan")
    files = [(name, size, tensors) for name, size, tensors in members["files"]]
    if not files:
        raise ValueError("it names no files")
    names = [name for name, _, _ in files]
    check_names(names)
    directory = directory_of(kind)
    if kind == "file" and len(names) != 1:
        raise ValueError(f"it has {len(names)} files, but the output is one file")
    if kind != "tree":
        for name in names:
            if "/" in name or (directory and not directory.may_have(name)):
                raise ValueError(f"{name!r} is not the name of a file of such an output")
    if directory and kind == "directory":
        _check_shards(names, directory.last, gaps=members["heading"]["options"].get("partial") is True)
    elif directory and directory.last not in names:
        raise ValueError(f"its files lack {directory.last!r}")
    inputs = members.get("inputs", {})
    if any("\0" in path for path, _, _ in inputs.values()):
        raise ValueError("the path of one of its inputs is not valid")
    permissions = members.get("permissions", [])
    return PlanDescription(plan_id, kind, parts, members["shift"], members["heading"], files, inputs, permissions)


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError unless each name occurs once, and leads to a file below the directory of the output."""
    for name, count in Counter(list(names)).items():
        if count > 1:
            raise ValueError(f"{name!r} occurs {count} times")
        if {"", ".", ".."}.intersection(name.split("/")) or "\0" in name or re.fullmatch(_OF_STAGING, name):
            raise ValueError(f"{name[:200]!r} is not the name of a file of an output")


def _check_shards(names: list[str], index: str, gaps: bool) -> None:
    """Raise ValueError unless the shards among `names` are those of one output, with its `index`. `gaps`: it may lack
    some, those of a reference of which it has no tensor."""
    shards = [match for name in names if (match := re.fullmatch(_SHARD, name))]
    if not shards:
        return
    count = int(shards[0][2])
    numbered = all(0 < int(match[1]) <= count == int(match[2]) for match in shards)
    if not numbered or (len(shards) < count and not gaps) or index not in names:
        raise ValueError("its shards do not belong to one output")


def _shape_of(heading: Any) -> dict[str, Any]:
    """Return the shape of a heading, with the members of the ways in which it was computed."""
    ways = ways_in(heading).values() if isinstance(heading, dict) else ()
    return {**_HEADING, **{name: shape for way in ways for name, shape in way.heading.items()}}


def _check_heading(heading: Mapping[str, Any]) -> None:
    """Raise ValueError if the members of a heading contradict one another."""
    for way in ways_in(heading).values():
        way.check(heading)


def check_manifest(manifest: Any) -> None:
    """Raise ValueError unless `manifest` is one."""
    check(manifest, {**_shape_of(manifest), "files": _FILES}, "it")
    _check_heading(manifest)
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
