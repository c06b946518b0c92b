"""Reads torch's tar format (before torch 0.1.10), which torch.load still reads.

Source: `legacy_load` in `torch/serialization.py`, and `torch/csrc/generic/serialization.cpp`. The archive, in the
format of POSIX.1-2001 (pax), has three members. `storages`: their number; for each a pickle with its key, location and
class, an int64 count, and its elements; at the end, a list of storages that are parts of others. `tensors`: their
number; for each a pickle with its key, storage and class, then dimensions, sizes, strides and offset. `pickle`: the
object, whose persistent ids are keys of these. Numbers and elements are little-endian.
"""

from __future__ import annotations

import array
import struct
from typing import Any

from ckptconv.cells import cut, way_into
from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.consecutive.pickles import Pickles
from ckptconv.features.tar.directory import listed
from ckptconv.formats.torch.container import SCANNED, TorchFile, first_identity, is_pickle
from ckptconv.formats.torch.file import TAR
from ckptconv.formats.torch.objects import vocabulary
from ckptconv.formats.torch.storages import Storage, storage_dtype
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.refusing import refuse_attack
from ckptconv.pickles.vocabulary import Constructor, Limits, MalformedError
from ckptconv.storage.paths import STANDARD_INPUT_NAME
from ckptconv.storage.reading import Reader
from ckptconv.storage.records import Records
from ckptconv.tensors.moves import File
from ckptconv.tensors.strides import MAX_BYTES, MAX_DIMS
from ckptconv.text import brief

# torch writes these members.
_PARTS = ("storages", "tensors", "pickle")
# Bytes first read for a pickle: that of a storage takes about a hundred, and the storage's data follows.
_WINDOW = 1 << 10
_COUNT = struct.Struct("<q")
_DIMENSIONS = struct.Struct("<i4x")


def read(reader: Reader, limits: Limits) -> TorchFile:
    """Read a file in the tar format: everything but the elements.

    Raises CorruptError for a file that contradicts itself, is truncated, contains more than torch.save writes, or is a
    pickle too; UnsupportedError for a tar archive of anything else.
    """
    file = _read(reader, limits)
    if is_pickle(reader.read_at(0, min(SCANNED, reader.file.size)), reader.file.path, or_begins=True):
        raise CorruptError(
            f"{reader.file.path} begins both as a tar archive and as a pickle: different programs would read it "
            "differently."
        )
    return file


def _read(reader: Reader, limits: Limits) -> TorchFile:
    listing = listed(reader)
    members, odd = listing.members, listing.odd
    if not members.keys() >= set(_PARTS) and (odd is None or members.keys() - set(_PARTS)):
        names = ", ".join(cut(name, 60) for name in list(members)[:5])
        path = reader.file.path
        way = f"specify {way_into('tar', members, path)}"
        if path == STANDARD_INPUT_NAME:
            way = "save it as a file and specify one member: tar://NAME::FILE"
        raise UnsupportedError(
            f"{path} is a tar archive, but torch.save did not write it: it contains {names or 'nothing'}.",
            f"Unpack it first, or {way}",
        )
    others = sorted(members.keys() - set(_PARTS))
    if others and odd is None:
        odd = listing.corrupt(f"in addition to the files of torch.save, it contains {brief(others[0])}")
    if odd is not None:
        for name in _PARTS:
            if name in members:
                start, stop = members[name]
                # Two of the members begin with a count; their first item is the second pickle.
                data = reader.read_at(start, min(SCANNED, stop - start))
                refuse_attack("refuse_pickles", data, f"{reader.file.path} ({name})", 2)
        raise odd
    pickles = {name: Pickles(reader, span.start, span.stop, limits, _WINDOW) for name, span in members.items()}
    contents = _Contents(reader.file)
    try:
        contents.read_storages(pickles["storages"], members["storages"].stop)
        contents.read_tensors(pickles["tensors"], members["tensors"].stop)
    except MalformedError as reason:
        raise CorruptError(f"{reader.file.path} {reason}.") from None
    loaded = pickles["pickle"].load("the object", vocabulary(contents.resolve))
    _check_end(pickles["pickle"], members["pickle"].stop, "pickle")
    return TorchFile(
        loaded.value,
        reader.file,
        tuple(dict.fromkeys((*(name for member in pickles.values() for name in member.opaque), *loaded.opaque))),
        tuple(dict.fromkeys((*(name for member in pickles.values() for name in member.globals), *loaded.globals))),
        "little",
        contents.records(),
        sum(member.bytes_read for member in pickles.values()),
        TAR,
    )


class _Contents:
    """The storages and tensors of a file, by key."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._storages: dict[int, Storage] = {}
        self._found: dict[int, Any] = {}
        self._next = first_identity()
        self._offsets = array.array("Q")
        self._sizes = array.array("Q")

    def read_storages(self, pickles: Pickles, stop: int) -> None:
        for _ in range(_count(pickles, "the number of storages")):
            key, _location, cls = _triple(pickles, "a storage")
            dtype = storage_dtype(cls)
            if dtype is None:
                raise MalformedError(f"has a storage of the unknown class {str(cls)[:200]}")
            (numel,) = _COUNT.unpack(pickles.take(_COUNT.size, "a storage"))
            offset, size = pickles.position, numel * dtype.itemsize
            if numel < 0:
                raise MalformedError(f"has a storage of {numel} elements")
            if size > stop - offset:
                raise MalformedError(
                    f"ends within a storage of {numel} elements of {dtype} at byte {offset}: it was cut short"
                )
            self._add(key, Storage(self._file, offset, size, dtype, brief(key), self._identity()))
            self._offsets.append(offset)
            self._sizes.append(size)
            pickles.position += size
        views = pickles.load("the storage views").value
        if type(views) is not list:
            raise MalformedError("has no list of storage views")
        for view in views:
            if type(view) not in (tuple, list) or len(view) != 4 or any(type(number) is not int for number in view):
                raise MalformedError("has a storage view that is not four integers")
            self._add_view(*view)
        _check_end(pickles, stop, "storages")

    def _add_view(self, key: int, root: int, offset: int, numel: int) -> None:
        whole = self._storages.get(root)
        if whole is None:
            raise MalformedError(f"has a view of storage {brief(root)}, which does not exist")
        item = whole.dtype.itemsize
        if offset < 0 or numel < 0 or (offset + numel) * item > whole.size:
            raise MalformedError(
                f"has a view of storage {brief(root)} with {brief(numel)} elements from element {brief(offset)} on, "
                f"but the storage has {whole.size // item} elements"
            )
        part = Storage(
            self._file, whole.offset + offset * item, numel * item, whole.dtype, brief(key), self._identity()
        )
        self._add(key, part)

    def _identity(self) -> int:
        self._next += 1
        return self._next

    def _add(self, key: int, storage: Storage) -> None:
        if key in self._found:
            raise MalformedError(f"has two entries with the key {brief(key)}")
        self._storages[key] = self._found[key] = storage

    def read_tensors(self, pickles: Pickles, stop: int) -> None:
        rebuild = vocabulary(lambda pid: None).constructors["torch._utils", "_rebuild_tensor"]
        for _ in range(_count(pickles, "the number of tensors")):
            key, root, _cls = _triple(pickles, "a tensor")
            storage = self._storages.get(root) if type(root) is int else None
            if key in self._found:
                raise MalformedError(f"has two entries with the key {brief(key)}")
            if storage is None:
                raise MalformedError(f"has a tensor {brief(key)} of storage {brief(root)}, which does not exist")
            self._found[key] = _tensor(pickles, storage, rebuild)
        _check_end(pickles, stop, "tensors")

    def resolve(self, pid: Any) -> Any:
        """Return the value of a persistent id: the object with that key, or a class given with its source code."""
        if type(pid) is tuple and len(pid) == 3 and type(pid[0]) is Global:
            return pid[0]
        if type(pid) is str and pid.isdecimal() and len(pid) < 20:
            pid = int(pid)
        value = self._found.get(pid) if type(pid) is int else None
        if value is None:
            raise MalformedError(f"refers to {brief(pid)}, which is neither a tensor nor a storage of the file")
        return value

    def records(self) -> Records:
        return Records(self._offsets, self._sizes, array.array("I", bytes(4 * len(self._offsets))))


def _tensor(pickles: Pickles, storage: Storage, rebuild: Constructor) -> Any:
    """Return a view of `storage` with the geometry that is next in `pickles`."""
    (dimensions,) = _DIMENSIONS.unpack(pickles.take(_DIMENSIONS.size, "a tensor"))
    if not 0 <= dimensions <= MAX_DIMS:
        raise MalformedError(f"has a tensor of {dimensions} dimensions; 0 to {MAX_DIMS} are supported")
    numbers = struct.unpack(f"<{2 * dimensions + 1}q", pickles.take(_COUNT.size * (2 * dimensions + 1), "a tensor"))
    return rebuild((storage, numbers[-1], numbers[:dimensions], numbers[dimensions:-1]))


def _count(pickles: Pickles, part: str) -> int:
    value = pickles.load(part).value
    if type(value) is not int or not 0 <= value < MAX_BYTES:
        raise MalformedError(f"has {brief(value)} for {part}")
    return value


def _triple(pickles: Pickles, part: str) -> tuple[int, Any, Any]:
    """Read a tuple of a key and two other values."""
    value = pickles.load(part).value
    if type(value) is not tuple or len(value) != 3 or type(value[0]) is not int:
        raise MalformedError(f"describes {part} by something other than a key, a location and a class")
    return value


def _check_end(pickles: Pickles, stop: int, member: str) -> None:
    if pickles.position != stop:
        raise pickles.corrupt(
            f"the data of its member {member} ends at byte {pickles.position}, but the member ends at byte {stop}"
        )
