"""Reads torch's tar format (before torch 0.1.10), which torch.load still reads.

Source: `legacy_load` in `torch/serialization.py`, and `torch/csrc/generic/serialization.cpp`. The archive, in the
format of POSIX.1-2001 (pax), has three members. `storages`: their number; for each a pickle with its key, location and
class, an int64 count, and its elements; at the end, a list of storages that are parts of others. `tensors`: their
number; for each a pickle with its key, storage and class, then dimensions, sizes, strides and offset. `pickle`: the
object, whose persistent ids are keys of these. Numbers and elements are little-endian.

torch.load reads it with Python's tarfile, which supports member types and extension headers that no file of torch has.
This module interprets them as tarfile does, but only to decide whether the file is meant for torch; it then refuses it.
"""

from __future__ import annotations

import array
import re
import struct
from typing import Any, NamedTuple

from ckptconv.errors import AGAIN, CorruptError, UnsupportedError
from ckptconv.formats.torch.container import SCANNED, Pickles, TorchFile, first_identity, refuse_attack
from ckptconv.formats.torch.objects import vocabulary
from ckptconv.formats.torch.storages import Storage, storage_dtype
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.vocabulary import DEFAULT_LIMITS, Constructor, Limits, MalformedError
from ckptconv.storage.reading import Reader
from ckptconv.storage.records import Records
from ckptconv.tensors.geometry import MAX_BYTES, MAX_DIMS
from ckptconv.tensors.moves import File
from ckptconv.text import brief

# Bytes at the start of a file that tell whether it is in this format: a tar header.
HEAD = 512
_BLOCK = 512
_ASCII = bytes(range(128))
_NAME, _SIZE, _SUM, _KIND = slice(0, 100), slice(124, 136), slice(148, 156), slice(156, 157)
_LINK, _PREFIX = slice(157, 257), slice(345, 500)
# Mode, owners, times and devices. tarfile ends the archive at a header where one of them is not a number.
_NUMBERS = (slice(100, 108), slice(108, 116), slice(116, 124), slice(136, 148), slice(329, 337), slice(337, 345))
_FILES, _PAX, _PAX_FOR_ALL = (b"0", b"\0"), b"x", b"g"
# Other types that tarfile supports: GNU's and Sun's headers for the next member, and types without data, whatever size.
_LONG_NAME, _LONG_LINK, _SOLARIS_PAX = b"L", b"K", b"X"
_HEADERS = (_LONG_NAME, _LONG_LINK, _PAX, _PAX_FOR_ALL, _SOLARIS_PAX)
_LINKS = (b"1", b"2")
_DIRECTORY = b"5"
_NO_DATA = (*_LINKS, b"3", b"4", _DIRECTORY, b"6")
_KNOWN = (*_HEADERS, *_NO_DATA)
_MAX_PAX = 1 << 20
_RECORD = re.compile(rb"(\d{1,9}) ([^=]+)=")
# Pax keys that affect a member's name or extent, and those that a header for a single member may have.
_TELLING, _OWN = ("path", "size", "linkpath", "GNU."), ("path", "size")
# torch writes these members.
_PARTS = ("storages", "tensors", "pickle")
_MAX_MEMBERS = 100
# Zeros end an archive; they fill a record, of 10 KiB by default.
_MAX_PADDING = 1 << 20
# Bytes first read for a pickle: that of a storage takes about a hundred, and the storage's data follows.
_WINDOW = 1 << 10
_COUNT = struct.Struct("<q")
_DIMENSIONS = struct.Struct("<i4x")


def is_tar(head: bytes) -> bool:
    """Whether a file that begins with `head` (HEAD bytes) is a tar archive.

    The checksum of the header decides, as it does for tarfile and so for torch.
    """
    return len(head) == HEAD and any(head) and _checksum(head[_SUM]) in _checksums(head)


def read_tar(reader: Reader, *, limits: Limits = DEFAULT_LIMITS) -> TorchFile:
    """Read a file in the tar format: everything but the elements.

    Raises CorruptError for a file that contradicts itself, is truncated, or contains more than torch.save writes;
    UnsupportedError for a tar archive of anything else.
    """
    listing = _listed(reader)
    members, odd = listing.members, listing.odd
    if not members.keys() >= set(_PARTS) and (odd is None or members.keys() - set(_PARTS)):
        some = ", ".join(name[:60] for name in list(members)[:5])
        raise UnsupportedError(
            f"{reader.file.path} is a tar archive, but not one of torch.save: it holds {some or 'nothing'}.",
            "Unpack it first.",
        )
    others = sorted(members.keys() - set(_PARTS))
    if others and odd is None:
        odd = listing.corrupt(f"beside what torch.save writes it holds {brief(others[0])}")
    if odd is not None:
        for name in _PARTS:
            if name in members:
                start, stop = members[name]
                # Two of the members begin with a count; their first item is the second pickle.
                refuse_attack(reader.read_at(start, min(SCANNED, stop - start)), f"{reader.file.path} ({name})", most=2)
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
        tuple(dict.fromkeys((*(name for each in pickles.values() for name in each.opaque), *loaded.opaque))),
        tuple(dict.fromkeys((*(name for each in pickles.values() for name in each.globals), *loaded.globals))),
        "little",
        contents.records(),
        sum(each.bytes_read for each in pickles.values()),
        "tar archive",
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
                raise MalformedError(f"has a storage of class {str(cls)[:200]}, which is not known")
            (numel,) = _COUNT.unpack(pickles.take(_COUNT.size, "a storage"))
            offset, size = pickles.position, numel * dtype.itemsize
            if not 0 <= size <= stop - offset:
                raise MalformedError(
                    f"ends within a storage of {numel} elements of {dtype} at byte {offset}: it was cut short"
                )
            self._add(key, Storage(self._file, offset, size, dtype, brief(key), self._identity()))
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
            raise MalformedError(f"has a part of storage {brief(root)}, which it lacks")
        item = whole.dtype.itemsize
        if offset < 0 or numel < 0 or (offset + numel) * item > whole.size:
            raise MalformedError(
                f"has {brief(numel)} elements at element {brief(offset)} as a part of storage {brief(root)}, which has "
                f"{whole.size // item}"
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
            raise MalformedError(f"has two things with the key {brief(key)}")
        self._storages[key] = self._found[key] = storage

    def read_tensors(self, pickles: Pickles, stop: int) -> None:
        rebuild = vocabulary(lambda pid: None).constructors["torch._utils", "_rebuild_tensor"]
        for _ in range(_count(pickles, "the number of tensors")):
            key, root, _cls = _triple(pickles, "a tensor")
            storage = self._storages.get(root) if type(root) is int else None
            if storage is None or key in self._found:
                raise MalformedError(
                    f"has a tensor {brief(key)} of storage {brief(root)}, which it lacks, or has one twice"
                )
            self._found[key] = _tensor(pickles, storage, rebuild)
        _check_end(pickles, stop, "tensors")

    def resolve(self, pid: Any) -> Any:
        """Return what a persistent id stands for: the object with that key, or a class given with its source code."""
        if type(pid) is tuple and len(pid) == 3 and type(pid[0]) is Global:
            return pid[0]
        if type(pid) is str and pid.isdecimal() and len(pid) < 20:
            pid = int(pid)
        found = self._found.get(pid) if type(pid) is int else None
        if found is None:
            raise MalformedError(f"needs {brief(pid)}, which is neither a tensor nor a storage of the file")
        return found

    def records(self) -> Records:
        return Records(self._offsets, self._sizes, array.array("I", bytes(4 * len(self._offsets))))


def _tensor(pickles: Pickles, storage: Storage, rebuild: Constructor) -> Any:
    """Return a view of `storage` with the geometry that `pickles` holds next."""
    (dimensions,) = _DIMENSIONS.unpack(pickles.take(_DIMENSIONS.size, "a tensor"))
    if not 0 <= dimensions <= MAX_DIMS:
        raise MalformedError(f"has a tensor of {dimensions} dimensions")
    numbers = struct.unpack(f"<{2 * dimensions + 1}q", pickles.take(_COUNT.size * (2 * dimensions + 1), "a tensor"))
    return rebuild((storage, numbers[-1], numbers[:dimensions], numbers[dimensions:-1]))


def _count(pickles: Pickles, what: str) -> int:
    value = pickles.load(what).value
    if type(value) is not int or not 0 <= value < MAX_BYTES:
        raise MalformedError(f"has {brief(value)} for {what}")
    return value


def _triple(pickles: Pickles, what: str) -> tuple[int, Any, Any]:
    """Read a tuple of a key and two other values."""
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


class _Listing:
    """The members of a tar archive by name, as tarfile finds them: of two with the same name, the last.

    `odd` is the error for the first thing in the archive that torch.save would not write.
    """

    def __init__(self, path: str) -> None:
        self.members: dict[str, _Span] = {}
        self.odd: CorruptError | None = None
        self._path = path

    def corrupt(self, reason: str, hint: str = "") -> CorruptError:
        return CorruptError(f"{self._path} is not a sound tar archive: {reason}.", hint)

    def note(self, reason: str) -> None:
        """Remember the error for an oddity, unless there is an earlier one."""
        self.odd = self.odd or self.corrupt(reason, AGAIN)

    def add(self, name: str, span: _Span | None) -> None:
        if name in self.members:
            self.note(f"it has two members named {brief(name)}")
        if span is not None:
            self.members[name] = span


def _listed(reader: Reader) -> _Listing:
    """List a tar archive as tarfile does. Note as odd what no file of torch has: only that can be read in two ways."""
    listing = _Listing(reader.file.path)
    at, size = 0, reader.file.size
    # Values of preceding headers: for all members, for the next member, and the next member's long name.
    for_all: dict[str, str] = {}
    for_next: dict[str, str] = {}
    named = ""
    for _ in range(_MAX_MEMBERS):
        if at + _BLOCK > size:
            listing.note(f"it ends at byte {size}, before its end is marked: it was cut short")
            return listing
        header = reader.read_at(at, _BLOCK)
        if not any(header):
            if size - at > _MAX_PADDING or any(reader.read_at(at, size - at)):
                listing.note(f"something follows its end at byte {at}")
            return listing
        length = _number(header[_SIZE])
        if not is_tar(header) or length is None or None in (_number(header[field]) for field in _NUMBERS):
            listing.note(f"there is no header at byte {at}, where one should be")
            return listing
        here, start, kind = at, at + _BLOCK, header[_KIND]
        if kind == b"\0" and _text(header[_NAME]).endswith("/"):
            kind = _DIRECTORY
        if kind not in (*_FILES, _PAX, _PAX_FOR_ALL):
            listing.note(f"the member at byte {here} is no plain file, but of type {kind!r}")
        if kind not in _KNOWN and "size" in for_next:
            digits = for_next["size"]
            length = int(digits) if digits.isdecimal() and len(digits) < 20 else size
        if kind in _NO_DATA:
            length = 0
        if start + length > size:
            listing.note(f"the member at byte {here} goes beyond its {size} bytes: it was cut short")
            return listing
        at = start + -(-length // _BLOCK) * _BLOCK
        if kind in _HEADERS:
            if (for_next or named) and kind != _PAX_FOR_ALL:
                listing.note(f"it has two headers for one member, the second at byte {here}")
            if length > _MAX_PAX:
                listing.note(f"the header at byte {here} takes {length} bytes")
                return listing
            content = reader.read_at(start, min(at, size) - start)
            if kind == _LONG_NAME:
                named = _text(content)
            elif kind != _LONG_LINK:
                found, end = _pax(content)
                if end != length or any(content[length:]):
                    listing.note(f"the extended header at byte {here} is malformed")
                telling = sorted(key for key in found if key.startswith(_TELLING) and (kind != _PAX or key not in _OWN))
                if telling:
                    listing.note(f"the extended header at byte {here} says {brief(telling[0])}")
                # If two precede one member, tarfile applies the first one last.
                for_all, for_next = (for_all | found, for_next) if kind == _PAX_FOR_ALL else (for_all, found | for_next)
            continue
        pax = for_all | for_next
        own = "/".join(filter(None, map(_text, (header[_PREFIX], header[_NAME]))))
        name = pax.get("GNU.sparse.name") or pax.get("path") or named or own
        if name.endswith("/"):
            listing.note(f"the file at byte {here} is named as a directory, {brief(name)}")
        target = listing.members.get(_text(header[_LINK])) if kind in _LINKS else None
        listing.add(name.rstrip("/"), target if kind in _NO_DATA else _Span(start, start + length))
        for_next, named = {}, ""
    listing.note(f"it has more than {_MAX_MEMBERS} members")
    return listing


def _number(field: bytes) -> int | None:
    """Parse a number field: octal digits, or a big-endian binary number after a byte 0x80. None if it is neither."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    try:
        return int(digits or b"0", 8) if digits.isdigit() or not digits else None
    except ValueError:
        return None


def _checksum(field: bytes) -> int | None:
    """Parse a checksum field as tarfile does, less strictly: up to a NUL, and any octal that Python's `int` accepts."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field, "big", signed=True) if field[0] == 0xFF else int.from_bytes(field[1:], "big")
    try:
        return int(field.partition(b"\0")[0].decode("ascii").strip() or "0", 8)
    except ValueError:
        return None


def _checksums(header: bytes) -> tuple[int, int]:
    """Return the sums of a header's unsigned and signed bytes, with spaces for its checksum. Either is a valid one."""
    counted = header[: _SUM.start] + b" " * (_SUM.stop - _SUM.start) + header[_SUM.stop :]
    unsigned = sum(counted)
    return unsigned, unsigned - 256 * len(counted.translate(None, _ASCII))


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _pax(data: bytes) -> tuple[dict[str, str], int]:
    """Parse the records "LENGTH KEY=VALUE\\n" of an extended header, up to a malformed one. Return their end too."""
    found: dict[str, str] = {}
    at = 0
    while record := _RECORD.match(data, at):
        stop = at + int(record[1])
        if not record.end() < stop <= len(data) or data[stop - 1 : stop] != b"\n":
            break
        found[record[2].decode("utf-8", "replace")] = data[record.end() : stop - 1].decode("utf-8", "replace")
        at = stop
    return found, at
