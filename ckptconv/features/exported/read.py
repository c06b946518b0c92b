"""Reads the weights in archives of torch.export by their description. No weight is read, and no program.

Source: torch/export/pt2_archive/_package.py, pt2_archive_constants.h and torch/_export/serde/schema.py of torch 2.13;
torch/export/__init__.py of torch 2.1 to 2.6. Members of an archive are NAME/data/weights/weight_0, the bytes of a
storage, and NAME/data/weights/model_weights_config.json, which says for each name the member, the dtype and the layout.
Until torch 2.6, the member serialized_state_dict.pt is a file of torch.save, as NAME/data/weights/model.pt was once.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.formats.format import CERTAIN, Guess, Probe
from ckptconv.formats.nesting import tensors_in
from ckptconv.formats.source import FileFacts, Source, Wanted
from ckptconv.formats.torch.zip import read_zip
from ckptconv.pickles.vocabulary import WHOLE_TREES
from ckptconv.plan import Input
from ckptconv.storage import LOCAL_SIGNATURE, strict_json
from ckptconv.storage.archive import Archive
from ckptconv.storage.location import Location
from ckptconv.storage.reading import Reader
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Stored
from ckptconv.text import brief, quoted, some

FAMILY = "exported"
_GUESS = Guess(CERTAIN, "an archive of torch.export (.pt2)", "convert {} OUTPUT", also=("torch",))
_WEIGHTS, _CONFIG = "data/weights/", "_weights_config.json"
# Files of torch.save with the state dict, in older releases; torch 2.0 had another name for it.
_STATE_DICTS = ("serialized_state_dict.pt", "serialized_state_dict.json", f"{_WEIGHTS}model.pt")
# The numbers of dtypes, and that of the layout of strided tensors.
_DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16",
    29: "float8_e4m3fn", 30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu",
    34: "uint32", 35: "uint64",
}  # fmt: skip
_STRIDED = 7
_MAX_DIMS = 64
_NUMBER = {"as_int": int}
_SHAPE = {
    "config": {
        str: {
            "path_name": re.compile(r"[\w.-]{1,200}"),
            "is_param": bool,
            "use_pickle": bool,
            "tensor_meta": strict_json.OrNull(
                {
                    "dtype": int,
                    "sizes": [_NUMBER],
                    "requires_grad": bool,
                    "device": object,
                    "strides": [_NUMBER],
                    "storage_offset": _NUMBER,
                    "layout": int,
                }
            ),
        }
    }
}


def sniff(probe: Probe) -> Guess | None:
    """Recognize a zip archive by its name."""
    is_one = probe.is_file and probe.place.name.endswith(".pt2") and probe.head[0].startswith(LOCAL_SIGNATURE)
    return _GUESS if is_one else None


def read(place: Location, wanted: Wanted) -> Source:
    """Open the weights in an archive. Raise CorruptError for one that contradicts itself, UnsupportedError for one
    without weights, or with weights that are objects."""
    with place.open_reader() as reader:
        archive = Archive(reader)
        top, slash, _ = next(iter(archive.rows), "").partition("/")
        archive.prefix = top + slash if f"{top}{slash}archive_format" in archive.rows else ""
        archive.check_names((*_STATE_DICTS, "byteorder"), (_WEIGHTS,))
        archive.locate_all()
        inside = [name[len(archive.prefix) :] for name in archive.rows if name.startswith(archive.prefix)]
        described = [name for name in inside if name.startswith(_WEIGHTS) and name.endswith(_CONFIG)]
        saved = [name for name in _STATE_DICTS if name in inside]
        if len(described) + len(saved) != 1:
            several = f"the weights of several: {some([*described, *saved])}" if described or saved else "no weights"
            raise UnsupportedError(f"{place} must contain the weights of exactly one program, but contains {several}.")
        opaque: list[str] = []
        if described:
            weights = _described(archive, described[0])
        else:
            weights, opaque = _saved(archive, reader, saved[0])
    records = archive.records(range(len(archive.rows)))
    return Source(
        format="archive of torch.export",
        family=FAMILY,
        path=place.path,
        weights=weights,
        structured=False,
        facts={"tensors": len(weights), "size": archive.file.size},
        files=FileFacts(opaque, records={archive.file.path: records}),
        inputs={place.name: Input(archive.file, (archive.file.size, records.digest() or archive.file.stamp))},
        bytes_read=archive.bytes_read,
        wanted=wanted,
        reread=functools.partial(read, place),
    )


def _described(archive: Archive, name: str) -> dict[str, LazyTensor]:
    """Return the weights that a description names."""
    where = f"{archive.file.path} ({archive.prefix}{name})"
    if archive.read("byteorder", b"little") != b"little":
        raise UnsupportedError(f"{archive.file.path} is big-endian.", "Export it on a little-endian machine.")
    try:
        description = strict_json.check(strict_json.parse(archive.read(name).decode()), _SHAPE, "it")
    except ValueError as error:
        raise CorruptError(f"{where} is not a valid description of weights: {error}.") from None
    # torch makes a storage with the dtype of its first mention.
    dtypes: dict[str, str] = {}
    return {
        named: _weight(archive, f"{where}: {quoted(named)}", meta, dtypes)
        for named, meta in description["config"].items()
    }


def _weight(archive: Archive, where: str, payload: dict[str, Any], dtypes: dict[str, str]) -> LazyTensor:
    """Return a weight; `dtypes` are those of members that were named before."""
    meta, path = payload["tensor_meta"], payload["path_name"]
    if payload["use_pickle"] or meta is None or meta["layout"] != _STRIDED or meta["dtype"] not in _DTYPES:
        raise UnsupportedError(
            f"{where} is stored as an object that torch.load restores; only plain tensors are supported."
        )
    shape, strides = (tuple(size_entry["as_int"] for size_entry in meta[name]) for name in ("sizes", "strides"))
    row = archive.rows.get(f"{archive.prefix}{_WEIGHTS}{path}")
    if row is None:
        raise CorruptError(f"{where} refers to {path}, which the archive does not contain.")
    if archive.methods[row]:
        raise UnsupportedError(f"{where} is compressed.", "Unpack the archive, and pack it without compression.")
    dtype = DTYPES[_DTYPES[meta["dtype"]]]
    if dtypes.setdefault(path, dtype.name) != dtype.name:
        raise CorruptError(f"{where} has the dtype {dtype}, but another weight in {path} has {dtypes[path]}.")
    offset = meta["storage_offset"]["as_int"]
    last = offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=False))
    is_empty = 0 in shape
    if len(shape) != len(strides) or len(shape) > _MAX_DIMS or archive.sizes[row] % dtype.itemsize:
        raise CorruptError(f"{where} has an invalid layout: shape {list(shape)}, strides {list(strides)}.")
    if not is_empty and (last + 1) * dtype.itemsize > archive.sizes[row]:
        raise CorruptError(f"{where} ends at element {last} of {path}, which has only {archive.sizes[row]} bytes.")
    at = 0 if is_empty else offset * dtype.itemsize
    return Stored(archive.file, archive.start + archive.payloads[row] + at, dtype, shape, strides)


def _saved(archive: Archive, reader: Reader, name: str) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return the weights in a member that is a file of torch.save, and the names of classes of objects in it."""
    row = archive.rows[archive.prefix + name]
    if archive.methods[row]:
        raise UnsupportedError(
            f"{archive.file.path}: member {brief(name)} is compressed.", "Unpack the member, and convert it."
        )
    try:
        content = read_zip(reader, archive.start + archive.payloads[row], archive.sizes[row], limits=WHOLE_TREES)
    except CkptconvError as error:
        raise type(error)(f"In member {brief(name)}: {error.message}", error.hint) from error
    archive.bytes_read += content.bytes_read
    weights = tensors_in(content.value) if isinstance(content.value, dict) else {}
    if not isinstance(content.value, dict) or len(weights) != len(content.value):
        raise UnsupportedError(f"{archive.file.path}: member {brief(name)} is not a state dict of tensors.")
    return weights, list(map(str, content.opaque))
