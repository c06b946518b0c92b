"""Manifests that state the SHA-256 of each file of a checkpoint: torch_checkpointing's and Megatron-core's.

Both are a JSON object with `algorithm` and `files` {name: hex}; torch_checkpointing's also has a version. A conversion
reads each file whose data it copies once more, and compares it, before an output gets its name: `Source.digests`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError, damaged
from ckptconv.storage import strict_json
from ckptconv.storage.digests import check_digest, digest_of
from ckptconv.storage.inside import check_inside
from ckptconv.storage.location import Location
from ckptconv.text import brief, some

_ALGORITHM = "sha256"
_HEX = re.compile(r"[0-9a-fA-F]{64}")


def parsed_json(data: bytes, where: str) -> Any:
    """Return the value of the JSON in `data`, the file `where`. Raise CorruptError if it is not JSON."""
    try:
        return strict_json.parse(data.decode())
    except (ValueError, RecursionError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise damaged(f"{where} is not valid: {why}.") from None


def stated_digests(directory: Location, name: str, data: bytes, heading: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256, in lower-case hex, of files in `directory` by path, as the manifest `name` (`data`) has them.

    `heading` are the manifest's members besides its algorithm and its files. Raise UnsupportedError for a manifest with
    other members, CorruptError if it is damaged or if a file that it names does not exist, and UnsafeError if a name
    leads out of the directory.
    """
    where = directory.join(name).path
    manifest = parsed_json(data, where)
    expected = {**heading, "algorithm": _ALGORITHM}
    stated = {key: manifest.get(key) for key in expected} if type(manifest) is dict else {}
    if stated != expected:
        shown, wanted = (", ".join(f"{k} {brief(v)}" for k, v in facts.items()) for facts in (stated, expected))
        raise UnsupportedError(
            f"{where} records {shown or 'no algorithm'}, but only {wanted} is supported.",
            f"Rename {where} to convert the checkpoint without its digests.",
        )
    files = manifest.get("files")
    if type(files) is not dict or any(type(hexed) is not str or not _HEX.fullmatch(hexed) for hexed in files.values()):
        raise CorruptError(f"{where} does not record a valid SHA-256 for each file.")
    for file in files:
        check_inside(file, where, directory.path)
    missing = [file for file in files if not directory.has_file(file)]
    if missing:
        raise CorruptError(
            f"{where} lists files that cannot be found ({len(missing)} of {len(files)}): {some(missing)}.",
            "Copy or download the missing files.",
        )
    return {directory.join(file).path: hexed.lower() for file, hexed in files.items()}


def check_content(path: str, data: bytes, digests: Mapping[str, str]) -> None:
    """Raise CorruptError unless `data`, the whole file at `path`, has the SHA-256 that `digests` state, if they do."""
    if path in digests:
        check_digest(path, hashlib.sha256(data).hexdigest(), digests[path])


def check_file(place: Location, digests: Mapping[str, str]) -> int:
    """Check the file at `place` as `check_content` does, but read it in pieces. Return the bytes read."""
    if place.path not in digests:
        return 0
    with place.open_reader() as reader:
        check_digest(place.path, digest_of(reader, _ALGORITHM), digests[place.path])
        return reader.file.size
