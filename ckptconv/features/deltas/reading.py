"""Reads deltas: the changes from one version of a model's weights to the next, in the layout that slime and sglang use.

A delta is a directory of safetensors files and an index. Each changed tensor is in it as bytes: the difference,
compressed with zstandard. The metadata of a file are the checksums of the new tensors by name; those of the index name
the versions before and after the delta, and the encoding:

- "xor": the exclusive or of the old bytes and the new ones.
- "overwrite": the number of changed bytes (u4), their positions in ascending order (u4 each), their new values.

Source: slime, backends/megatron_utils/update_weight/update_weight_from_disk_delta.py and utils/disk_delta.py.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptconv.cli.registered import COMMANDS
from ckptconv.errors import CkptconvError, UnsupportedError, UsageError, damaged
from ckptconv.formats.safetensors import read_header
from ckptconv.formats.weight_map import read_index
from ckptconv.storage.digests import hasher
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import Reader
from ckptconv.tensors.lazy import Stored
from ckptconv.text import brief, some

INDEX = "model.safetensors.index.json"
ENCODINGS = (XOR, OVERWRITE) = ("xor", "overwrite")
CHECKSUMS = ("adler32", "xxh3-128", "blake3")
ZSTD = "zstd"
# The most bytes of a tensor whose changes, and their positions, a u4 can count.
MOST_OVERWRITTEN = (1 << 32) - 1
# Advice on a difference that `average --minus` wrote, if its directory is taken for a delta.
_ADDED = (
    " To add a plain difference, such as a task vector: `ckptconv average BASE DIFFERENCE --minus BASE OUTPUT "
    "--weights 2,1`."
)
ORDER = "BASE must come before the deltas: ckptconv patch BASE DELTA... OUTPUT. "
_VERSION = re.compile(r"\d{1,18}")
# Bytes of the header of a frame: RFC 8878, section 3.1.1.
_MOST_OF_HEAD = 18


# ------------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Delta:
    """A delta: the versions of a model before and after it, and its data for each changed tensor.

    `payloads` are the compressed differences by name, `checksums` those of the new tensors. `sizes` are the sizes of
    the differences that are known before they are unpacked. `inputs` identifies its files by name.
    """

    path: str
    version: int
    base_version: int
    encoding: str
    checksum: str
    payloads: Mapping[str, Stored]
    checksums: Mapping[str, str]
    sizes: Mapping[str, int]
    inputs: Mapping[str, Hashable]


def read_delta(place: Location) -> Delta:
    """Read the descriptions of the delta at `place`.

    Raise UsageError if it is not a directory with an index, or if its checksums need a package that is not installed,
    CorruptError if it contradicts itself, and UnsupportedError for an unknown encoding, compression or checksum.
    """
    if place.kind != "directory" or INDEX not in place.names:
        missing = f"it contains no {INDEX}" if place.kind == "directory" else f"it is {place.entry.described}"
        if place.kind == "missing":
            missing = "it does not exist"
        added = _ADDED if place.kind != "missing" and "average" in COMMANDS else ""
        kind = "A delta is a directory; " if place.kind == "file" else ""
        hint = f"{kind}`ckptconv diff A B --delta DIR` writes a delta.{added}"
        if place.kind == "file" and is_delta(place.parent):
            hint = f"It is a file of a delta: give the directory, {place.parent}."
        raise UsageError(f"{place} is not a delta: {missing}.", hint)
    where = place.join(INDEX)
    index = read_index(where)
    if index is None or "base_version" not in index.metadata:
        raise UsageError(
            f"{place} is not a delta: its {INDEX} does not specify the version to change.",
            f"If it is a checkpoint, give it as BASE; `ckptconv diff BASE {place} --delta DIR` writes a delta that "
            f"produces it.{_ADDED if 'average' in COMMANDS else ''}",
        )
    metadata = index.metadata
    encoding = _known(place, metadata, "delta_encoding", ENCODINGS)
    _known(place, metadata, "compression_format", (ZSTD,))
    checksum = _known(place, metadata, "checksum_format", CHECKSUMS)
    hasher(checksum)  # raises if its package is not installed
    payloads: dict[str, Stored] = {}
    checksums: dict[str, str] = {}
    sizes: dict[str, int] = {}
    inputs: dict[str, Hashable] = {INDEX: index.identity}
    for name in dict.fromkeys(index.weight_map.values()):
        file = place.join(name)
        if file.kind != "file":
            raise damaged(f"{file} is missing, but {where} lists it.")
        with file.open_reader() as reader:
            header = read_header(reader)
            # On a store, each would take a request.
            if not is_remote(file.path):
                sizes.update(_sizes(reader, header.tensors))
        inputs[name] = header.identity
        listed = {key for key, value in index.weight_map.items() if value == name}
        if listed != header.tensors.keys():
            some_of = some(sorted(listed ^ header.tensors.keys()), 3)
            raise damaged(f"{file} and {where} list different tensors: only one of the two lists {some_of}.")
        for key, tensor in header.tensors.items():
            if tensor.dtype.name != "uint8" or len(tensor.shape) != 1:
                raise damaged(
                    f"{file}: {key!r} is {tensor.dtype} {[*tensor.shape]}, but a delta must contain bytes (uint8, one "
                    "dimension)."
                )
            if key not in header.metadata:
                raise damaged(f"{file} has no checksum of {key!r}, so it cannot be verified.")
            payloads[key], checksums[key] = tensor, header.metadata[key]
    return Delta(
        place.path,
        _version(place, metadata, "version"),
        _version(place, metadata, "base_version"),
        encoding,
        checksum,
        payloads,
        checksums,
        sizes,
        inputs,
    )


def _metadata_at(place: Location) -> Mapping[str, Any]:
    """Return the metadata of the index of the delta in the directory at `place`; {} if it has no such index."""
    with contextlib.suppress(CkptconvError):
        index = read_index(place.join(INDEX)) if place.kind == "directory" and INDEX in place.names else None
        return index.metadata if index is not None and "base_version" in index.metadata else {}
    return {}


def is_delta(place: Location) -> bool:
    """Return whether the directory at `place` has the index of a delta."""
    return bool(_metadata_at(place))


def versions_at(place: Location) -> tuple[int, int] | None:
    """Return the versions before and after the delta in the directory at `place`; None if it has no such delta."""
    with contextlib.suppress(CkptconvError):
        if metadata := _metadata_at(place):
            return _version(place, metadata, "base_version"), _version(place, metadata, "version")
    return None


def _sizes(reader: Reader, payloads: Mapping[str, Stored]) -> Iterator[tuple[str, int]]:
    """Yield the names of frames of zstandard that state their unpacked sizes, and these sizes."""
    try:
        import zstandard
    except ImportError:  # reported when the first of them is unpacked
        return
    for name, payload in payloads.items():
        head = reader.read_at(payload.offset, min(payload.nbytes, _MOST_OF_HEAD))
        with contextlib.suppress(zstandard.ZstdError):  # likewise
            size = zstandard.get_frame_parameters(head).content_size
            if size != zstandard.CONTENTSIZE_UNKNOWN:
                yield name, size


def _known(place: Location, metadata: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
    value = metadata.get(key)
    if type(value) is not str or value not in known:
        raise UnsupportedError(f"{place}: its {key} is {brief(value)}; supported: {', '.join(known)}.")
    return value


def _version(place: Location, metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key)
    if type(value) is not str or not _VERSION.fullmatch(value):
        raise damaged(f"{place}: its {key} is {brief(value)}, but digits were expected.")
    return int(value)
