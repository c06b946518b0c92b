"""Reads torch's zip archives (.pt, .pth, .bin, .ckpt since torch 1.6) by ranges: the directory, the pickle, no data.

Source: `torch/serialization.py` and `caffe2/serialize/inline_container.cc`; the zip format is PKWARE's APPNOTE.TXT.
An archive P.pt has the members P/data.pkl (the description), P/data/KEY (a storage each), and in newer files
P/byteorder. P is any name; the file may have been renamed since.

`zipfile` reads the directory. All else is checked here: names, methods, sizes, and that no two members overlap.
"""

from __future__ import annotations

import array
import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptconv.errors import CkptconvError, CorruptError, LimitError, UnsupportedError
from ckptconv.formats.torch_objects import Storage, storage_id, vocabulary
from ckptconv.storage import Reader, is_remote
from ckptconv.tensors import File
from ckptconv.tree import Global
from ckptconv.unpickle import DEFAULT_LIMITS, Limits, MalformedError, RefusedError, load

PICKLE = "data.pkl"
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


@dataclass(frozen=True)
class TorchFile:
    """What a torch file holds: the tree, and facts about it.

    `opaque` and `globals` name the classes and functions that were kept as inert data, and all that were mentioned.
    `records` has every storage that a tensor uses, by key. `bytes_read` counts what was read to find all this out.
    """

    value: Any
    file: File
    opaque: tuple[Global, ...]
    globals: tuple[Global, ...]
    byteorder: str
    records: Mapping[str, Record]
    bytes_read: int


def read_zip(reader: Reader, limits: Limits = DEFAULT_LIMITS) -> TorchFile:
    """Open a zip archive that torch.save wrote.

    Raises CorruptError for an archive that contradicts itself or is truncated, UnsupportedError for one that is not
    a checkpoint (TorchScript, another kind of file), or whose tensors are compressed.
    """
    archive = _Archive(reader)
    pickle = _description(archive)
    prefix = pickle.removesuffix(PICKLE)
    archive.locate(prefix)
    byteorder = archive.read(prefix + "byteorder", b"little")
    if byteorder not in (b"little", b"big"):
        raise archive.corrupt(f"its byteorder is {byteorder[:20]!r}, not little or big")
    storages = _Storages(archive, prefix + "data/", byteorder == b"big")
    loaded = load(
        archive.read(pickle), vocabulary(storages.resolve), where=f"{reader.file.path} ({pickle})", limits=limits
    )
    return TorchFile(
        loaded.value,
        reader.file,
        loaded.opaque,
        loaded.globals,
        byteorder.decode(),
        storages.records,
        archive.bytes_read,
    )


def _description(archive: _Archive) -> str:
    """The name of the member that holds the pickle."""
    names = archive.names
    found = [name for name in names if name == PICKLE or name.endswith("/" + PICKLE)]
    # A storage may have any key; the pickle is the outermost.
    found = [name for name in found if not any(name.startswith(other[: -len(PICKLE)] + "data/") for other in found)]
    if len(found) != 1:
        kind = CorruptError if found else UnsupportedError
        what = f"{len(found)} members named {PICKLE}" if found else f"no member named {PICKLE}"
        some = ", ".join(sorted(names)[:5])
        raise kind(
            f"{archive.file.path} is a zip archive, but not one of torch.save: it has {what} among its {len(names)}"
            f"{': ' if some else ''}{some[:200]}{' …' if len(names) > 5 else ''}."
        )
    prefix = found[0].removesuffix(PICKLE)
    if prefix + "constants.pkl" in archive.names or any(name.startswith(prefix + "code/") for name in archive.names):
        raise UnsupportedError(
            f"{archive.file.path} is a TorchScript archive: a program with its weights, not a checkpoint.",
            "Load it with torch.jit.load, and save its state_dict() with torch.save.",
        )
    return found[0]


class _Storages:
    """The storages of an archive, made when a persistent id asks for them."""

    def __init__(self, archive: _Archive, prefix: str, swapped: bool) -> None:
        self._archive = archive
        self._file = archive.file
        self._prefix = prefix
        self._swapped = swapped
        self._made: dict[str, Storage] = {}
        self.records: dict[str, Record] = {}

    def resolve(self, pid: Any) -> Storage:
        wanted = storage_id(pid)
        nbytes = wanted.numel * wanted.dtype.itemsize
        made = self._made.get(wanted.key)
        if made is None:
            offset = 0 if wanted.location == "meta" else self._record(wanted.key, nbytes).offset
            made = Storage(self._file, offset, nbytes, wanted.dtype, wanted.key, wanted.location, self._swapped)
            self._made[wanted.key] = made
        elif made.size != nbytes:
            raise MalformedError(f"gives storage {wanted.key[:40]!r} two sizes, {made.size} and {nbytes} bytes")
        elif made.dtype is not wanted.dtype:
            made = Storage(self._file, made.offset, nbytes, wanted.dtype, made.key, made.location, self._swapped)
        return made

    def _record(self, key: str, nbytes: int) -> Record:
        member = self._archive.member(self._prefix + key)
        if member is None:
            raise MalformedError(f"needs storage {key[:40]!r} of {nbytes} bytes, which the archive does not have")
        if member.method:
            raise RefusedError(
                f"needs storage {key[:40]!r}, which is compressed ({_METHODS.get(member.method, member.method)}); "
                "unpack the archive, pack it again without compression (zip -0), and convert that"
            )
        if member.size != nbytes:
            raise MalformedError(f"needs {nbytes} bytes of storage {key[:40]!r}, whose record has {member.size}")
        # Archives can be written without checksums: all are 0 then.
        record = Record(member.payload, member.size, member.crc if member.crc or not member.size else None)
        self.records[key] = record
        return record


# ------------------------------------------------------------------------------------------------------ the archive


class _Member(NamedTuple):
    """A member of the archive: `payload` is where its bytes begin, `packed` how many they are in the file."""

    payload: int
    size: int
    packed: int
    crc: int
    method: int


class _Archive:
    """A zip archive as torch writes them: members one after the other, then the directory.

    It is held in columns, one row a member in the order of the file: an archive may have a million.
    """

    def __init__(self, reader: Reader) -> None:
        self.file = reader.file
        self.bytes_read = 0
        self._reader = reader
        infos, end = self._directory()
        infos.sort(key=lambda info: info.header_offset)
        # Row by name.
        self.names: dict[str, int] = {}
        self._headers = array.array("Q")
        self._sizes = array.array("Q")
        self._packed = array.array("Q")
        self._crcs = array.array("L")
        self._methods = array.array("H")
        self._flags = array.array("H")
        for info in infos:
            self._add(info)
        self._headers.append(end)
        # Where payloads begin; 0 until the local header has been read.
        self._payloads = array.array("Q", bytes(8 * len(self._sizes)))
        self._check_room()

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
        head = self._reader.read_at(0, min(self.file.size, 512))
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
        if name in self.names:
            raise self.corrupt(f"it has two members named {name[:100]!r}")
        if info.flag_bits & _ENCRYPTED:
            raise UnsupportedError(f"{self.file.path}: member {name[:100]!r} is encrypted.", "Decrypt it first.")
        if info.compress_type == 0 and info.compress_size != info.file_size:
            raise self.corrupt(f"member {name[:100]!r} is stored, in {info.compress_size} bytes for {info.file_size}")
        self.names[name] = len(self._sizes)
        try:
            self._headers.append(info.header_offset)
            self._sizes.append(info.file_size)
            self._packed.append(info.compress_size)
            self._crcs.append(info.CRC)
            self._methods.append(info.compress_type)
            self._flags.append(info.flag_bits)
        except OverflowError:
            raise self.corrupt(f"member {name[:100]!r} has a negative offset") from None

    def _check_room(self) -> None:
        """Every member must end before the next begins, and the last before the directory."""
        for name, row in self.names.items():
            end = self._headers[row] + _LOCAL_HEADER.size + len(name) + self._packed[row]
            if end > self._headers[row + 1]:
                raise self._overlap(name, row)

    def _overlap(self, name: str, row: int) -> CorruptError:
        return self.corrupt(
            f"member {name[:100]!r}, of {self._packed[row]} bytes from byte {self._headers[row]}, overlaps what follows"
            f" at byte {self._headers[row + 1]}"
        )

    # ---- local headers

    def locate(self, prefix: str) -> None:
        """Read the local headers of the members whose names begin with `prefix`, and check them.

        Only they tell where a payload begins: the padding that aligns it is written there and not in the directory.
        """
        gap = _GAP_REMOTE if is_remote(self.file.path) else _GAP_LOCAL
        rows: list[tuple[int, int, bytes]] = []
        start = stop = 0
        for name, row in self.names.items():
            if not name.startswith(prefix):
                continue
            header = self._headers[row]
            raw = name.encode("utf-8" if self._flags[row] & _UTF8 else "cp437", "surrogateescape")
            end = header + _LOCAL_HEADER.size + len(raw)
            if rows and (header - stop > gap or end - start > _WINDOW):
                self._locate(rows, start, stop)
                rows = []
            if not rows:
                start = header
            rows.append((row, header - start, raw))
            stop = end
        if rows:
            self._locate(rows, start, stop)

    def _locate(self, rows: list[tuple[int, int, bytes]], start: int, stop: int) -> None:
        if stop > self._headers[-1]:
            raise self.corrupt("a local header reaches into the directory")
        window = self.read_at(start, stop - start)
        for row, at, raw in rows:
            signature, _, flags, method, _, _, _, packed, size, name_length, extra_length = _LOCAL_HEADER.unpack_from(
                window, at
            )
            at += _LOCAL_HEADER.size
            payload = start + at + name_length + extra_length
            known = (_ZIP64, 0) if flags & _SIZES_FOLLOW else (_ZIP64,)
            if (
                signature != _LOCAL_SIGNATURE
                or name_length != len(raw)
                or window[at : at + name_length] != raw
                or method != self._methods[row]
                or flags & _ENCRYPTED
                or (size != self._sizes[row] and size not in known)
                or (packed != self._packed[row] and packed not in known)
            ):
                raise self.corrupt(
                    f"the local header at byte {start + at - _LOCAL_HEADER.size} is not that of {raw[:100]!r}, as the "
                    "directory says",
                    "The file is damaged, or was written in two ways at once.",
                )
            if payload + self._packed[row] > self._headers[row + 1]:
                raise self._overlap(raw.decode("utf-8", "replace"), row)
            self._payloads[row] = payload

    # ---- members

    def member(self, name: str) -> _Member | None:
        """The member of this name, which `locate` has located."""
        row = self.names.get(name)
        if row is None:
            return None
        return _Member(self._payloads[row], self._sizes[row], self._packed[row], self._crcs[row], self._methods[row])

    def read(self, name: str, default: bytes | None = None) -> bytes:
        """The whole content of a small member, with its checksum checked."""
        member = self.member(name)
        if member is None:
            if default is None:
                raise self.corrupt(f"it has no member {name[:100]!r}")
            return default
        if member.size > MAX_PICKLE:
            raise LimitError(f"{self.file.path}: {name[:100]} has {member.size} bytes; at most {MAX_PICKLE} are read.")
        data = self.read_at(member.payload, member.packed)
        if member.method == zipfile.ZIP_DEFLATED:
            data = self._inflated(name, data, member.size)
        elif member.method:
            raise UnsupportedError(
                f"{self.file.path}: {name[:100]} is compressed with {_METHODS.get(member.method, member.method)}.",
                "Unpack the archive, and pack it again without compression (zip -0).",
            )
        if member.crc and zlib.crc32(data) != member.crc:
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
            data = self._tail[start - self._tail_start :][:length]
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
