"""Reads torch's zip archives (.pt, .pth, .bin, .ckpt since torch 1.6) by ranges: the directory, the pickle, no data.

Source: `torch/serialization.py` and `caffe2/serialize/inline_container.cc`; the zip format is PKWARE's APPNOTE.TXT.
An archive P.pt has the members P/data.pkl (the description), P/data/KEY (a storage each), and in newer files
P/byteorder. P is any name; the file may have been renamed since.

`zipfile` reads the directory. All else is checked here: names, methods, sizes, and that no two members overlap.
"""

from __future__ import annotations

import array
import bisect
import io
import itertools
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

from ckptconv.errors import CkptconvError, CorruptError, LimitError, UnsupportedError
from ckptconv.formats.torch_objects import Storage, storage_id, vocabulary
from ckptconv.storage import Reader, is_remote
from ckptconv.tensors import File
from ckptconv.tree import Global
from ckptconv.unpickle import DEFAULT_LIMITS, Limits, MalformedError, RefusedError, load

PICKLE = "data.pkl"
_STORAGES = "data/"
# A million tensors take a seventh of this, and their directory a tenth.
MAX_PICKLE = 1 << 30
MAX_DIRECTORY = 1 << 30

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LOCAL_SIGNATURE = b"PK\x03\x04"
# Flags: encrypted in one of three ways; sizes and checksum follow the payload; the name is UTF-8.
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_SIZES_FOLLOW = 0x8
_UTF8 = 0x800
# In place of a size: see the zip64 field.
_ZIP64 = 0xFFFFFFFF
# Local headers are read together as long as the bytes between them are cheaper to read than to skip.
_WINDOW = 1 << 20
_GAP_LOCAL, _GAP_REMOTE = 1 << 9, 1 << 18
_TAIL = 1 << 16
_METHODS = {8: "deflate", 9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstandard", 95: "xz"}


class Record(NamedTuple):
    """A storage's bytes: where they are, how many, and their CRC-32; None where the writer did not record one."""

    offset: int
    size: int
    crc: int | None


class Records(Sequence[Record]):
    """The storages of an archive, in the order of the file; a few bytes each, for there may be a million."""

    def __init__(self, offsets: array.array[int], sizes: array.array[int], crcs: array.array[int]) -> None:
        self._offsets, self._sizes, self._crcs = offsets, sizes, crcs

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        size, crc = self._sizes[index], self._crcs[index]
        # Archives can be written without checksums: all are 0 then.
        return Record(self._offsets[index], size, crc if crc or not size else None)

    def containing(self, offset: int) -> Record | None:
        """The record that has byte `offset` of the file in it."""
        index = bisect.bisect_right(self._offsets, offset) - 1
        record = self[index] if index >= 0 else None
        return record if record and offset < record.offset + record.size else None


@dataclass(frozen=True)
class TorchFile:
    """What a torch file holds: the tree, and facts about it.

    `opaque` and `globals` name the classes and functions that were kept as inert data, and all that were mentioned.
    `records` are the storages of the archive, used or not. `bytes_read` counts what was read to find all this out.
    """

    value: Any
    file: File
    opaque: tuple[Global, ...]
    globals: tuple[Global, ...]
    byteorder: str
    records: Records
    bytes_read: int


def read_zip(reader: Reader, limits: Limits = DEFAULT_LIMITS) -> TorchFile:
    """Open a zip archive that torch.save wrote.

    Raises CorruptError for an archive that contradicts itself or is truncated, UnsupportedError for one that is not
    a checkpoint (TorchScript, another kind of file), or whose tensors are compressed.
    """
    archive = _Archive(reader)
    byteorder = archive.read("byteorder", b"little")
    if byteorder not in (b"little", b"big"):
        raise archive.corrupt(f"its byteorder is {byteorder[:20]!r}, not little or big")
    pickle = archive.read(PICKLE)
    archive.locate_storages()
    storages = _Storages(archive, byteorder == b"big")
    where = f"{reader.file.path} ({archive.prefix}{PICKLE})"
    loaded = load(pickle, vocabulary(storages.resolve), where=where, limits=limits)
    return TorchFile(
        loaded.value,
        reader.file,
        loaded.opaque,
        loaded.globals,
        byteorder.decode(),
        archive.records(),
        archive.bytes_read,
    )


class _Storages:
    """Resolves persistent ids to the storages of an archive."""

    _archives = itertools.count()

    def __init__(self, archive: _Archive, swapped: bool) -> None:
        self._archive = archive
        self._swapped = swapped
        # Storages are told apart by a number, among all archives of this process.
        self._first = next(self._archives) << 32
        # Sizes recur, and are kept with every tensor.
        self._sizes: dict[int, int] = {}

    def resolve(self, pid: Any) -> Storage:
        wanted = storage_id(pid)
        archive = self._archive
        nbytes = wanted.numel * wanted.dtype.itemsize
        nbytes = self._sizes.setdefault(nbytes, nbytes)
        row = archive.storages.get(wanted.key)
        if row is None:
            if wanted.location != "meta":
                raise MalformedError(
                    f"needs storage {wanted.key[:40]!r} of {nbytes} bytes, which the archive does not have"
                )
            offset = row = 0
        else:
            offset, size, method = archive.payloads[row], archive.sizes[row], archive.methods[row]
            if method:
                raise RefusedError(
                    f"needs storage {wanted.key[:40]!r}, which is compressed ({_METHODS.get(method, method)}); "
                    "unpack the archive, pack it again without compression (zip -0), and convert that"
                )
            if size != nbytes:
                raise MalformedError(f"needs {nbytes} bytes of storage {wanted.key[:40]!r}, whose record has {size}")
        return Storage(
            archive.file,
            offset,
            nbytes,
            wanted.dtype,
            wanted.key,
            self._first + row,
            wanted.location == "meta",
            self._swapped,
        )


# ------------------------------------------------------------------------------------------------------ the archive


class _Archive:
    """A zip archive as torch writes them: members one after the other, then the directory.

    It is held in columns, with a row for every member in the order of the file. `prefix` is what the names of all
    members begin with. `storages` has the rows of the storages by key, `others` those of other members by name.
    """

    def __init__(self, reader: Reader) -> None:
        self.file = reader.file
        self.bytes_read = 0
        self._reader = reader
        infos, end = self._directory()
        self.prefix = _prefix(self.file, [info.orig_filename for info in infos])
        self.storages: dict[str, int] = {}
        self.others: dict[str, int] = {}
        self.headers = array.array("Q")
        self.sizes = array.array("Q")
        self.packed = array.array("Q")
        self.crcs = array.array("I")
        self.methods = array.array("H")
        self.flags = array.array("H")
        infos.sort(key=lambda info: info.header_offset, reverse=True)
        while infos:
            self._add(infos.pop())
        self.headers.append(end)
        # Where payloads begin; 0 until the local header has been read.
        self.payloads = array.array("Q", bytes(self.sizes.itemsize * len(self.sizes)))
        for row in itertools.chain(self.storages.values(), self.others.values()):
            # The name has at least as many bytes as it has characters; `locate` looks closer.
            if self.headers[row] + _LOCAL_HEADER.size + self.packed[row] > self.headers[row + 1]:
                raise self._overlap(row)

    def corrupt(self, reason: str, hint: str = "") -> CorruptError:
        return CorruptError(f"{self.file.path} is not a sound zip archive: {reason}.", hint)

    def read_at(self, offset: int, length: int) -> bytes:
        self.bytes_read += length
        return self._reader.read_at(offset, length)

    # ---- the directory

    def _directory(self) -> tuple[list[zipfile.ZipInfo], int]:
        """The entries of the directory, and where it begins."""
        try:
            with zipfile.ZipFile(_Window(self)) as directory:
                infos, end = directory.filelist, directory.start_dir
                directory.NameToInfo.clear()
                return infos, end
        except CkptconvError:
            raise
        except Exception as error:
            # zipfile raises BadZipFile, and whatever its parts raise for what it did not foresee.
            raise self._not_readable(error) from None

    def _not_readable(self, error: Exception) -> CkptconvError:
        head = self.read_at(0, min(self.file.size, 512))
        what = what_it_is(head, self.file.size)
        if what:
            return type(what)(f"{self.file.path} {what.message}", what.hint)
        if head.startswith(_LOCAL_SIGNATURE):
            return self.corrupt(
                f"it begins like one, but the directory at its end cannot be read ({str(error).rstrip('.')}). It has "
                f"{self.file.size} bytes; it was probably cut short",
                "Copy or download it again.",
            )
        return CorruptError(
            f"{self.file.path} is not a torch checkpoint: it is no zip archive, and begins with {head[:16]!r}."
        )

    def _add(self, info: zipfile.ZipInfo) -> None:
        name = info.orig_filename
        storages = self.prefix + _STORAGES
        table, key = (self.storages, name[len(storages) :]) if name.startswith(storages) else (self.others, name)
        if key in table:
            raise self.corrupt(f"it has two members named {name[:100]!r}")
        if info.flag_bits & _ENCRYPTED:
            raise UnsupportedError(f"{self.file.path}: member {name[:100]!r} is encrypted.", "Decrypt it first.")
        if info.compress_type == 0 and info.compress_size != info.file_size:
            raise self.corrupt(f"member {name[:100]!r} is stored, in {info.compress_size} bytes for {info.file_size}")
        table[key] = len(self.sizes)
        try:
            self.headers.append(info.header_offset)
            self.sizes.append(info.file_size)
            self.packed.append(info.compress_size)
            self.crcs.append(info.CRC)
            self.methods.append(info.compress_type)
            self.flags.append(info.flag_bits)
        except OverflowError:
            raise self.corrupt(f"member {name[:100]!r} begins before the file") from None

    def _overlap(self, row: int) -> CorruptError:
        return self.corrupt(
            f"the member of {self.packed[row]} bytes at byte {self.headers[row]} overlaps what follows at byte "
            f"{self.headers[row + 1]}"
        )

    # ---- local headers

    def locate(self, members: Iterable[tuple[str, int]]) -> None:
        """Read the local headers of these members, given by name and row in the order of the file, and check them.

        Only they tell where a payload begins: the padding that aligns it is written there and not in the directory.
        """
        gap = _GAP_REMOTE if is_remote(self.file.path) else _GAP_LOCAL
        near: list[tuple[int, bytes]] = []
        start = stop = 0
        for name, row in members:
            raw = name.encode("utf-8" if self.flags[row] & _UTF8 else "cp437")
            header = self.headers[row]
            end = header + _LOCAL_HEADER.size + len(raw)
            if near and (header > stop + gap or end > start + _WINDOW):
                self._locate_near(near, start, stop)
                near = []
            if not near:
                start = header
            near.append((row, raw))
            stop = end
        if near:
            self._locate_near(near, start, stop)

    def _locate_near(self, members: list[tuple[int, bytes]], start: int, stop: int) -> None:
        """The local headers that lie from byte `start` to `stop`, by row and name."""
        if stop > self.headers[-1]:
            raise self.corrupt("a local header reaches into the directory")
        window = self.read_at(start, stop - start)
        for row, raw in members:
            at = self.headers[row] - start
            signature, _, flags, method, _, _, _, packed, size, name_length, extra_length = _LOCAL_HEADER.unpack_from(
                window, at
            )
            at += _LOCAL_HEADER.size
            if (
                signature != _LOCAL_SIGNATURE
                or name_length != len(raw)
                or window[at : at + name_length] != raw
                or method != self.methods[row]
                or flags & _ENCRYPTED
                or not self._agrees(size, self.sizes[row], flags)
                or not self._agrees(packed, self.packed[row], flags)
            ):
                raise self.corrupt(
                    f"what is at byte {self.headers[row]} is not the member {raw[:100]!r} that the directory says",
                    "The file is damaged, or something was added to it or taken out.",
                )
            self.payloads[row] = payload = start + at + name_length + extra_length
            if payload + self.packed[row] > self.headers[row + 1]:
                raise self._overlap(row)

    @staticmethod
    def _agrees(size: int, known: int, flags: int) -> bool:
        """Whether a size in a local header is the known one, or says that it stands elsewhere."""
        return size in (known, _ZIP64) or (size == 0 and flags & _SIZES_FOLLOW != 0)

    def locate_storages(self) -> None:
        prefix = self.prefix + _STORAGES
        self.locate((prefix + key, row) for key, row in self.storages.items())

    def records(self) -> Records:
        rows = self.storages.values()
        payloads, sizes, crcs = (
            array.array(c.typecode, [c[r] for r in rows]) for c in (self.payloads, self.sizes, self.crcs)
        )
        return Records(payloads, sizes, crcs)

    # ---- small members

    def read(self, name: str, default: bytes | None = None) -> bytes:
        """The whole content of the member of this name without the prefix, with its checksum checked."""
        name = self.prefix + name
        row = self.others.get(name)
        if row is None:
            if default is None:
                raise self.corrupt(f"it has no member {name[:100]!r}")
            return default
        size, method = self.sizes[row], self.methods[row]
        if size > MAX_PICKLE:
            raise LimitError(f"{self.file.path}: {name[:100]!r} has {size} bytes; at most {MAX_PICKLE} are read.")
        self.locate([(name, row)])
        data = self.read_at(self.payloads[row], self.packed[row])
        if method == zipfile.ZIP_DEFLATED:
            data = self._inflated(name, data, size)
        elif method:
            raise UnsupportedError(
                f"{self.file.path}: {name[:100]!r} is compressed ({_METHODS.get(method, method)}).",
                "Unpack the archive, and pack it again without compression (zip -0).",
            )
        if self.crcs[row] and zlib.crc32(data) != self.crcs[row]:
            raise self.corrupt(f"the checksum of {name[:100]!r} is wrong: its content has changed", "Copy it again.")
        return data

    def _inflated(self, name: str, data: bytes, size: int) -> bytes:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            result = inflater.decompress(data, size + 1)
        except zlib.error as error:
            raise self.corrupt(f"{name[:100]!r} cannot be inflated ({error})") from None
        if len(result) != size or not inflater.eof:
            raise self.corrupt(f"{name[:100]!r} does not inflate to the {size} bytes that the directory says")
        return result


def _prefix(file: File, names: list[str]) -> str:
    """What the names of all members begin with, found from the one that holds the pickle."""
    # A storage may have any key; the pickle is the outermost.
    found = sorted((name for name in names if name == PICKLE or name.endswith("/" + PICKLE)), key=len)
    prefixes = [name.removesuffix(PICKLE) for name in found]
    prefixes = [prefix for prefix in prefixes if not prefix.startswith(prefixes[0] + _STORAGES)]
    if len(prefixes) != 1:
        kind = CorruptError if prefixes else UnsupportedError
        what = f"{len(prefixes)} members named {PICKLE}" if prefixes else f"no member named {PICKLE}"
        some = f": {', '.join(sorted(names)[:5])[:200]}{' …' if len(names) > 5 else ''}" if names else ""
        raise kind(
            f"{file.path} is a zip archive, but not one of torch.save: it has {what} among its {len(names)} members{some}."
        )
    prefix = prefixes[0]
    if any(name == prefix + "constants.pkl" or name.startswith(prefix + "code/") for name in names):
        raise UnsupportedError(
            f"{file.path} is a TorchScript archive: a program with its weights, not a checkpoint.",
            "Load it with torch.jit.load, and save its state_dict() with torch.save.",
        )
    return prefix


class _Window(io.RawIOBase):
    """The archive as the seekable file that zipfile wants. Its last bytes, where the directory is, are read once."""

    def __init__(self, archive: _Archive) -> None:
        self._archive = archive
        self._size = archive.file.size
        self._tail_start = max(self._size - _TAIL, 0)
        self._tail = archive.read_at(self._tail_start, self._size - self._tail_start)
        self._pos = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._pos

    def seek(self, offset: int, whence: int = 0) -> int:
        pos = offset + (0, self._pos, self._size)[whence]
        if pos < 0:
            raise OSError("before the beginning")
        self._pos = pos
        return pos

    def read(self, length: int = -1) -> bytes:
        start = min(self._pos, self._size)
        length = min(self._size - start, length if length >= 0 else self._size)
        if length > MAX_DIRECTORY:
            raise LimitError(f"{self._archive.file.path}: its directory has {length} bytes; at most {MAX_DIRECTORY}.")
        if start >= self._tail_start:
            at = start - self._tail_start
            data = self._tail[at : at + length]
        else:
            data = self._archive.read_at(start, length)
        self._pos += len(data)
        return data


# ------------------------------------------------------------------------------------------------- not a zip archive

_CORRUPT, _UNSUPPORTED = CorruptError, UnsupportedError
_STREAM_MAGIC = bytes.fromhex("8a0a6cfc9c46f9206aa85019")
_AGAIN = "Download it again, and look at what the server says."
_UNPACK = "Unpack it first."
# What begins so: the error, what it is, what to do.
_BEGINNINGS: tuple[tuple[bytes, type[CorruptError] | type[UnsupportedError], str, str], ...] = (
    (
        b"version https://git-lfs",
        _CORRUPT,
        "is a git-lfs pointer, not the file itself.",
        "Fetch the file: git lfs pull.",
    ),
    (b"<!doctype html", _CORRUPT, "is a web page, not a checkpoint.", _AGAIN),
    (b"<html", _CORRUPT, "is a web page, not a checkpoint.", _AGAIN),
    (b"<?xml", _CORRUPT, "is an XML document, not a checkpoint.", _AGAIN),
    (b"\x1f\x8b", _UNSUPPORTED, "is compressed with gzip.", _UNPACK),
    (b"\x28\xb5\x2f\xfd", _UNSUPPORTED, "is compressed with zstandard.", _UNPACK),
    (b"BZh", _UNSUPPORTED, "is compressed with bzip2.", _UNPACK),
    (b"\xfd7zXZ\0", _UNSUPPORTED, "is compressed with xz.", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", _UNSUPPORTED, "is a 7z archive.", _UNPACK),
    (b"\x89HDF\r\n\x1a\n", _UNSUPPORTED, "is an HDF5 file, such as Keras writes.", ""),
    (b"GGUF", _UNSUPPORTED, "is a GGUF file.", ""),
    (b"\x93NUMPY", _UNSUPPORTED, "is a numpy array (.npy).", ""),
)


def what_it_is(head: bytes, size: int) -> CorruptError | UnsupportedError | None:
    """What a file that is no zip archive is, judged by its first 512 bytes, as an error whose message lacks the name.

    None if it is nothing known.
    """
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for beginning, kind, what, hint in _BEGINNINGS:
        if head.startswith(beginning) or (beginning[:1] == b"<" and text.startswith(beginning)):
            return kind(what, hint)
    if not size:
        return CorruptError("is empty (0 bytes).", "It was probably never written: look for another copy.")
    if not head.strip(b"\0"):
        return CorruptError(
            "begins with zeros only: space was reserved for it, and not filled.", "Copy or download it again."
        )
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return UnsupportedError("is a safetensors file already.", "It needs no conversion.")
    if head[257:262] == b"ustar":
        return UnsupportedError("is a tar archive, not a zip archive.")
    if _STREAM_MAGIC in head[:32]:
        return UnsupportedError("is in torch's stream format (before 1.6), not a zip archive.")
    if head[:1] == b"\x80" and head[1:2] <= b"\x05":
        return UnsupportedError("is a plain pickle, not a file of torch.save.")
    return None
