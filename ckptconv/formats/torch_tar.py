"""Reads torch's tar format (before torch 0.1.10), which torch.load still reads.

Source: `legacy_load` in `torch/serialization.py`, and `torch/csrc/generic/serialization.cpp`. The archive, in the
format of POSIX.1-2001 (pax), has three members. `storages`: their number; for each a pickle with its key, location and
class, an int64 count, and its elements; at the end, which storages are parts of others. `tensors`: their number; for
each a pickle with its key, storage and class, then dimensions, sizes, strides and offset. `pickle`: the object, with
keys for persistent ids. Numbers and elements are little-endian.
"""

from __future__ import annotations

import array
import struct
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.formats.torch_container import AGAIN, Pickles, Records, TorchFile, first_identity
from ckptconv.formats.torch_objects import Storage, storage_dtype, vocabulary
from ckptconv.soundness import MAX_BYTES, MAX_DIMS
from ckptconv.storage import Reader
from ckptconv.tensors import File
from ckptconv.tree import Global
from ckptconv.vocabulary import DEFAULT_LIMITS, Constructor, Limits, MalformedError

# How much of a file tells whether it is in this format.
HEAD = 512
_BLOCK = 512
_MAGIC = slice(257, 262)
_NAME, _SIZE, _KIND, _PREFIX = slice(0, 100), slice(124, 136), slice(156, 157), slice(345, 500)
_FILES, _PAX, _PAX_FOR_ALL = (b"0", b"\0"), b"x", b"g"
_MAX_PAX = 1 << 20
# torch writes three members; the rest is patience.
_MAX_MEMBERS = 100
# Archives end with zeros, to full records of 10 KiB by default.
_MAX_PADDING = 1 << 20
# A pickle of a storage takes a hundred bytes, and data follows.
_WINDOW = 1 << 10
_COUNT = struct.Struct("<q")
_DIMENSIONS = struct.Struct("<i4x")


def is_tar(head: bytes) -> bool:
    """Whether a file that begins with `head` (HEAD bytes) is a tar archive."""
    return head[_MAGIC] == b"ustar" and not head.startswith(b"PK")


def read_tar(reader: Reader, *, limits: Limits = DEFAULT_LIMITS) -> TorchFile:
    """Open a file in the tar format: everything is read but the elements.

    Raises CorruptError for a file that contradicts itself or is truncated, UnsupportedError for a tar archive of
    anything else.
    """
    members = _members(reader)
    if {"storages", "tensors", "pickle"} - members.keys():
        some = ", ".join(name[:60] for name in list(members)[:5])
        raise UnsupportedError(
            f"{reader.file.path} is a tar archive, but not one of torch.save: it holds {some or 'nothing'}.",
            "Unpack it first.",
        )
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
        tuple(dict.fromkeys((*(name for each in pickles.values() for name in each.opaque), *loaded.opaque))),
        tuple(dict.fromkeys((*(name for each in pickles.values() for name in each.globals), *loaded.globals))),
        "little",
        contents.records(),
        sum(each.bytes_read for each in pickles.values()),
        "tar archive",
    )


class _Contents:
    """Storages and tensors by their keys."""

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
                raise MalformedError(f"has a storage of class {str(cls)[:200]}, which is not known")
            (numel,) = _COUNT.unpack(pickles.take(_COUNT.size, "a storage"))
            offset, size = pickles.position, numel * dtype.itemsize
            if not 0 <= size <= stop - offset:
                raise MalformedError(
                    f"ends within a storage of {numel} elements of {dtype} at byte {offset}: it was cut short"
                )
            self._add(key, Storage(self._file, offset, size, dtype, str(key), self._identity()))
            self._offsets.append(offset)
            self._sizes.append(size)
            pickles.position += size
        views = pickles.load("the parts of storages").value
        if type(views) is not list:
            raise MalformedError("has no list of parts of storages")
        for view in views:
            if type(view) not in (tuple, list) or len(view) != 4 or any(type(number) is not int for number in view):
                raise MalformedError("has a part of a storage that is not four numbers")
            self._add_view(*view)
        _check_end(pickles, stop, "storages")

    def _add_view(self, key: int, root: int, offset: int, numel: int) -> None:
        whole = self._storages.get(root)
        if whole is None:
            raise MalformedError(f"has a part of storage {root}, which it lacks")
        item = whole.dtype.itemsize
        if offset < 0 or numel < 0 or (offset + numel) * item > whole.size:
            raise MalformedError(
                f"has {numel} elements at element {offset} as a part of storage {root}, which has {whole.size // item}"
            )
        part = Storage(self._file, whole.offset + offset * item, numel * item, whole.dtype, str(key), self._identity())
        self._add(key, part)

    def _identity(self) -> int:
        self._next += 1
        return self._next

    def _add(self, key: int, storage: Storage) -> None:
        if key in self._found:
            raise MalformedError(f"has two things with the key {key}")
        self._storages[key] = self._found[key] = storage

    def read_tensors(self, pickles: Pickles, stop: int) -> None:
        rebuild = vocabulary(lambda pid: None).constructors["torch._utils", "_rebuild_tensor"]
        for _ in range(_count(pickles, "the number of tensors")):
            key, root, _cls = _triple(pickles, "a tensor")
            storage = self._storages.get(root) if type(root) is int else None
            if storage is None or key in self._found:
                raise MalformedError(
                    f"has a tensor {key} of storage {str(root)[:40]}, which it lacks, or has one twice"
                )
            self._found[key] = _tensor(pickles, storage, rebuild)
        _check_end(pickles, stop, "tensors")

    def resolve(self, pid: Any) -> Any:
        """What a persistent id stands for: a key, or a class beside its source code."""
        if type(pid) is tuple and len(pid) == 3 and type(pid[0]) is Global:
            return pid[0]
        if type(pid) is str and pid.isdecimal() and len(pid) < 20:
            pid = int(pid)
        found = self._found.get(pid) if type(pid) is int else None
        if found is None:
            raise MalformedError(f"needs {str(pid)[:40]}, which is neither a tensor nor a storage of the file")
        return found

    def records(self) -> Records:
        return Records(self._offsets, self._sizes, array.array("I", bytes(4 * len(self._offsets))))


def _tensor(pickles: Pickles, storage: Storage, rebuild: Constructor) -> Any:
    """The tensor whose geometry comes next: a view of `storage`."""
    (dimensions,) = _DIMENSIONS.unpack(pickles.take(_DIMENSIONS.size, "a tensor"))
    if not 0 <= dimensions <= MAX_DIMS:
        raise MalformedError(f"has a tensor of {dimensions} dimensions")
    numbers = struct.unpack(f"<{2 * dimensions + 1}q", pickles.take(_COUNT.size * (2 * dimensions + 1), "a tensor"))
    return rebuild((storage, numbers[-1], numbers[:dimensions], numbers[dimensions:-1]))


def _count(pickles: Pickles, what: str) -> int:
    value = pickles.load(what).value
    if type(value) is not int or not 0 <= value < MAX_BYTES:
        raise MalformedError(f"has {str(value)[:40]} for {what}")
    return value


def _triple(pickles: Pickles, what: str) -> tuple[int, Any, Any]:
    """A key and two more things."""
    value = pickles.load(what).value
    if type(value) is not tuple or len(value) != 3 or type(value[0]) is not int:
        raise MalformedError(f"describes {what} by something other than a key, where it belongs, and a class")
    return value


def _check_end(pickles: Pickles, stop: int, member: str) -> None:
    if pickles.position != stop:
        raise pickles.corrupt(
            f"its member {member} has {stop - pickles.position} bytes more than it should, from byte {pickles.position}"
        )


# --------------------------------------------------------------------------------------------------------- the archive


class _Span(NamedTuple):
    start: int
    stop: int


def _members(reader: Reader) -> dict[str, _Span]:
    """Where the members of a tar archive are, by name."""
    members: dict[str, _Span] = {}
    at, size = 0, reader.file.size
    pax: dict[str, str] = {}

    def corrupt(reason: str) -> CorruptError:
        return CorruptError(f"{reader.file.path} is not a sound tar archive: {reason}.", AGAIN)

    for _ in range(_MAX_MEMBERS):
        if at + _BLOCK > size:
            raise corrupt(f"it ends at byte {size}, before its end is marked: it was cut short")
        header = reader.read_at(at, _BLOCK)
        if not header.strip(b"\0"):
            if size - at > _MAX_PADDING or reader.read_at(at, size - at).strip(b"\0"):
                raise corrupt(f"something follows its end at byte {at}")
            return members
        if not is_tar(header) or _checksum(header) != _number(header[148:156]):
            raise corrupt(f"there is no header at byte {at}, where one should be")
        start, kind = at + _BLOCK, header[_KIND]
        length = _number(header[_SIZE])
        if kind in _FILES and "size" in pax:
            length = int(pax["size"]) if pax["size"].isdecimal() and len(pax["size"]) < 20 else None
        if length is None or start + length > size:
            raise corrupt(f"the member at byte {at} goes beyond its {size} bytes: it was cut short")
        if kind in (_PAX, _PAX_FOR_ALL):
            if length > _MAX_PAX:
                raise corrupt(f"the header at byte {at} takes {length} bytes")
            found = _pax(reader.read_at(start, length))
            if found is None:
                raise corrupt(f"the extended header at byte {at} is malformed")
            pax = found if kind == _PAX else pax
        else:
            name = pax.get("path") or _text(header[_PREFIX], header[_NAME])
            if kind in _FILES:
                if name in members:
                    raise corrupt(f"it has two members named {name[:100]!r}")
                members[name] = _Span(start, start + length)
            pax = {}
        at = start + -(-length // _BLOCK) * _BLOCK
    raise corrupt(f"it has more than {_MAX_MEMBERS} members")


def _number(field: bytes) -> int | None:
    """A number: octal digits, or if the first bit is set the rest of the bits; None if it is neither."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    try:
        return int(digits or b"0", 8) if digits.isdigit() or not digits else None
    except ValueError:
        return None


def _checksum(header: bytes) -> int:
    return sum(header[:148]) + 8 * ord(" ") + sum(header[156:])


def _text(prefix: bytes, name: bytes) -> str:
    parts = (part.partition(b"\0")[0].decode("utf-8", "replace") for part in (prefix, name))
    return "/".join(filter(None, parts))


def _pax(data: bytes) -> dict[str, str] | None:
    """The records of an extended header, each "LENGTH KEY=VALUE\\n"; None if they are malformed."""
    found = {}
    while data:
        digits, space, _ = data.partition(b" ")
        if not space or not digits.isdigit() or len(digits) > 9 or not len(digits) + 2 < int(digits) <= len(data):
            return None
        key, equals, value = data[len(digits) + 1 : int(digits)].partition(b"=")
        if not equals or value[-1:] != b"\n":
            return None
        found[key.decode("utf-8", "replace")] = value[:-1].decode("utf-8", "replace")
        data = data[int(digits) :]
    return found
