"""Reads torch's stream format (before torch 1.6, and since then with `_use_new_zipfile_serialization=False`).

Source: `_legacy_save` and `_legacy_load` in `torch/serialization.py`, and `torch/csrc/generic/serialization.cpp`.
The file is a sequence of pickles: a magic number, the version, facts about the machine, the object, and the keys of the
storages. The storages follow in the order of the keys, each as an element count (int64) and its bytes.

Only a pickle itself says where it ends, and the object precedes the keys that determine where its storages lie. So the
object is read twice: first for its end and the sizes of its storages, from which all offsets follow, and then for its
content. Elements are little-endian, whatever the machine that wrote them.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.consecutive.pickles import Pickles
from ckptconv.formats.torch.container import STREAM_HEAD, STREAM_MAGIC, TorchFile, first_identity, is_stream
from ckptconv.formats.torch.file import STREAM
from ckptconv.formats.torch.objects import vocabulary
from ckptconv.formats.torch.storages import Storage, StorageId, storage_id
from ckptconv.pickles.machine import load
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.vocabulary import Limits, MalformedError, RefusedError, Vocabulary
from ckptconv.storage.reading import DESCRIPTIONS, Reader, max_gap
from ckptconv.storage.records import Records
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.moves import File
from ckptconv.tensors.strides import MAX_BYTES
from ckptconv.text import brief, count_of

VERSION = 1001
_COUNT = struct.Struct("<q")


def read(reader: Reader, limits: Limits) -> TorchFile:
    """Read a file in the stream format: its pickles and the counts before its storages, but no elements.

    Raises CorruptError for a file that is truncated, contradicts itself, or has data after the last storage, which
    torch.load would ignore silently. Raises UnsupportedError for an unknown version, and for a file of several objects.
    """
    pickles = Pickles(reader, 0, reader.file.size, limits)
    if pickles.load("the magic number").value != STREAM_MAGIC:
        raise pickles.corrupt("it does not begin with the magic number of torch's stream format")
    version = pickles.load("the version").value
    if version != VERSION:
        raise UnsupportedError(
            f"{reader.file.path} is in version {brief(version)} of torch's stream format; only {VERSION} is supported."
        )
    machine = pickles.load("the machine description").value
    if type(machine) is not dict:
        raise pickles.corrupt(f"its machine description is of type {type(machine).__name__}, but a dict was expected")
    storages = _Storages(reader.file, swapped=machine.get("little_endian") is False)

    pickles.load("the object", _surveyed(storages), before=b"]")
    pickled = pickles.last
    keys = pickles.load("the keys of its storages").value
    storages.place(_checked_keys(keys, storages, pickles), pickles.position)
    _check_counts(reader, storages, pickles)
    loaded = load(pickled, vocabulary(storages.resolve), where=pickles.where("the object"), limits=limits)
    return TorchFile(
        loaded.value,
        reader.file,
        tuple(dict.fromkeys((*pickles.opaque, *loaded.opaque))),
        tuple(dict.fromkeys((*pickles.globals, *loaded.globals))),
        "little",
        storages.records(),
        pickles.bytes_read,
        STREAM,
    )


def _surveyed(storages: _Storages) -> Vocabulary:
    """Return the vocabulary of the first reading, which notes the storages and rebuilds no tensors."""
    words = vocabulary(storages.note)
    rebuilding = {name for name in words.constructors if name[0].startswith("torch._")}
    building = {name for name in words.builders if name[0].startswith("torch")}
    return words._replace(
        constructors={**words.constructors, **dict.fromkeys(rebuilding, lambda args: None)},
        builders={**words.builders, **dict.fromkeys(building, lambda value, state: value)},
    )


# --------------------------------------------------------------------------------------------------------- storages


class _Noted(NamedTuple):
    """A storage as a persistent id describes it. All ids of a key must agree: torch believes the first one."""

    dtype: DType
    numel: int
    meta: bool
    of_number: bool  # whether the key is an integer, as in the oldest files


class _View(NamedTuple):
    """A part of a storage, in elements, with its own identity."""

    root: str
    offset: int
    numel: int
    identity: int
    of_number: bool


class _Storages:
    """The storages of a file. First `note` each that the object mentions, then `place` all, then `resolve` ids."""

    def __init__(self, file: File, swapped: bool) -> None:
        self.file = file
        # The storage of each key, as the object describes it.
        self.noted: dict[str, _Noted] = {}
        # Equal values in `noted` share one object.
        self._kinds: dict[_Noted, _Noted] = {}
        # `rows`: each key's index in the list of keys. `offsets`, `sizes`: the bytes of each storage, by that index.
        self.rows: dict[str, int] = {}
        self.offsets = array.array("Q")
        self.sizes = array.array("Q")
        self.end = 0
        # A big-endian machine wrote the file.
        self.swapped = swapped
        self._first = first_identity()
        self._views: dict[str, _View] = {}

    def note(self, pid: Any) -> Any:
        """Note the storage of a persistent id. An id ("module", class, file, source) stands for its class instead."""
        if type(pid) is tuple and len(pid) == 4 and pid[0] == "module" and type(pid[1]) is Global:
            return pid[1]
        wanted = storage_id(pid)
        noted = _Noted(wanted.dtype, wanted.numel, wanted.location == "meta", type(pid[2]) is int)
        known = self.noted.setdefault(wanted.key, self._kinds.setdefault(noted, noted))
        if known != noted and (known.numel or noted.numel or known[2:] != noted[2:]):
            sizes = f"as {known.numel} elements of {known.dtype} and as {noted.numel} of {noted.dtype}"
            how = sizes if known[:2] != noted[:2] else "at two locations, or with two types of keys"
            raise MalformedError(f"describes storage {brief(wanted.key)} {how}")
        if self.swapped and wanted.dtype.kind == "c":
            raise RefusedError(
                "has complex numbers from a big-endian machine, and torch did not write their two parts separately"
            )
        return None

    def place(self, keys: list[str], start: int) -> None:
        """Compute the offsets of the storages, which begin at byte `start` in the order of `keys`."""
        for key in keys:
            dtype, numel, *_ = self.noted[key]
            self.rows[key] = len(self.rows)
            self.offsets.append(start + _COUNT.size)
            self.sizes.append(numel * dtype.itemsize)
            start += _COUNT.size + self.sizes[-1]
        self.end = start

    def resolve(self, pid: Any) -> Any:
        """Return the storage, or the class, of a persistent id. Call `place` first."""
        if pid[0] == "module":
            return pid[1]
        wanted = storage_id(pid)
        row = self.rows[wanted.key]
        offset, size, identity = self.offsets[row], self.sizes[row], self._first + row
        if wanted.view is not None:
            view = self._view(wanted)
            offset += view.offset * wanted.dtype.itemsize
            size = view.numel * wanted.dtype.itemsize
            identity = view.identity
        return Storage(self.file, offset, size, wanted.dtype, wanted.key, identity, meta=wanted.location == "meta")

    def _view(self, wanted: StorageId) -> _View:
        """Return the part of a storage that `wanted.view` describes: (key of the view, offset, element count)."""
        view = wanted.view
        if type(view) is not tuple or len(view) != 3 or type(view[1]) is not int or type(view[2]) is not int:
            raise MalformedError("has a view of a storage whose parts are of the wrong types")
        key, offset, numel = _name(view[0]), view[1], view[2]
        if key is None:
            raise MalformedError("has a view of a storage whose key is neither text nor an address")
        if key in self.rows:
            # torch keeps storages and views in one table, and takes the first of either.
            raise MalformedError(f"has a view of a storage with the same key as a storage, {brief(key)}")
        if offset < 0 or numel < 0 or offset + numel > wanted.numel:
            raise MalformedError(
                f"has a view of {brief(numel)} elements at element {brief(offset)} of storage {brief(wanted.key)}, "
                f"which has {wanted.numel} elements"
            )
        identity = self._first + len(self.rows) + len(self._views)
        view = _View(wanted.key, offset, numel, identity, type(view[0]) is int)
        first_view = self._views.setdefault(key, view)
        if first_view != view._replace(identity=first_view.identity):
            raise MalformedError(f"has two different storage views with the key {brief(key)}")
        return first_view

    def records(self) -> Records:
        return Records(self.offsets, self.sizes, array.array("I", bytes(4 * len(self.offsets))))


def _name(key: Any) -> str | None:
    """Return a key as text; None for other types. The oldest files have addresses, which are integers, as keys."""
    if type(key) is int and -MAX_BYTES < key < MAX_BYTES:
        return str(key)
    return key if type(key) is str else None


def _checked_keys(keys: Any, storages: _Storages, pickles: Pickles) -> list[str]:
    """Check the list of keys: each key that the object mentions must be in it once, and no others."""
    named = [_name(key) for key in keys] if type(keys) is list else [None]
    names = [name for name in named if name is not None]
    if len(names) < len(named):
        raise pickles.corrupt("the object is not followed by a list of the keys of its storages")
    missing, unknown = storages.noted.keys() - set(names), set(names) - storages.noted.keys()
    if missing:
        count = count_of(len(missing), "storage")
        raise pickles.corrupt(f"it lacks {count} that its object needs, such as {brief(min(missing))}")
    if unknown:
        raise pickles.corrupt(
            f"it has {count_of(len(unknown), 'storage')} that its object does not use, such as {brief(min(unknown))}"
        )
    if len(set(names)) != len(names):
        raise pickles.corrupt("it lists a storage twice")
    # torch distinguishes the integer 1 from the text "1".
    odd = next((key for key in keys if storages.noted[str(key)].of_number != (type(key) is int)), None)
    if odd is not None:
        raise pickles.corrupt(
            f"its object and its list of storages write the key {brief(odd)} differently: as number and as text"
        )
    return names


def _check_counts(reader: Reader, storages: _Storages, pickles: Pickles) -> None:
    """Check the element count before each storage, and that the file ends with the last storage."""
    size = reader.file.size
    noted = iter((*storages.noted[key][:2], key) for key in storages.rows)
    for offset, count in _counts(reader, storages, pickles):
        dtype, numel, key = next(noted)
        # Some releases on big-endian machines wrote little-endian elements after a big-endian count.
        if count != _COUNT.pack(numel) and not (storages.swapped and count == _COUNT.pack(numel)[::-1]):
            (stated,) = _COUNT.unpack(count)
            raise pickles.corrupt(
                f"at byte {offset}, storage {brief(key)} should have {numel} elements of {dtype}, but the file "
                f"records {stated}"
            )
    if storages.end > size:
        raise pickles.truncated(f"it ends at byte {size}, but its storages end at byte {storages.end}")
    if storages.end < size:
        another = is_stream(reader.read_at(storages.end, min(STREAM_HEAD, size - storages.end)))
        trailer = "another object" if another else "data that is not part of it"
        raise (UnsupportedError if another else CorruptError)(
            f"{reader.file.path}: the object in it ends at byte {storages.end} of {size}, but {trailer} follows, "
            "which torch.load would not read.",
            f"To convert the object, copy it to another file with head -c {storages.end}.",
        )


def _counts(reader: Reader, storages: _Storages, pickles: Pickles) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each count within the file. Counts that lie close together share a read."""
    width = _COUNT.size
    inside = (offset - width for offset in storages.offsets if offset <= reader.file.size)
    for offsets in coalesced(inside, width, reader.file):
        start, stop = offsets[0], offsets[-1] + width
        window = pickles.read_at(start, stop - start)
        for offset in offsets:
            yield offset, window[offset - start :][:width]


def coalesced(offsets: Iterable[int], length: int, file: File) -> Iterator[list[int]]:
    """Group ascending offsets of items of `length` bytes in `file`; yield the groups to read at once."""
    gap = max_gap(file)
    group: list[int] = []
    for offset in offsets:
        if group and (offset > group[-1] + length + gap or offset + length > group[0] + DESCRIPTIONS):
            yield group
            group = []
        group.append(offset)
    if group:
        yield group
