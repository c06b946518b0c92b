"""Read zip archives by ranges: the directory, the local headers, and small members; no data.

Source: PKWARE's APPNOTE.TXT. This reads the directory itself, as `zipfile` takes four times as long and 600 bytes for
each member; there may be a million. Everything is checked: names, methods, sizes, and that no two members overlap. An
archive that two readers read differently is refused. This module knows nothing of the members' content.
"""

from __future__ import annotations

import array
import itertools
import operator
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptconv.errors import AGAIN, CkptconvError, CorruptError, LimitError, TruncatedError, UnsupportedError
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import DESCRIPTIONS, Reader, max_gap
from ckptconv.storage.records import Records
from ckptconv.storage.zip_directory import (
    END_RECORDS,
    END_SIGNATURE,
    ENTRY,
    ENTRY_SIGNATURE,
    LOCAL_HEADER,
    TAIL,
    ZIP64,
    ZIP64_FIELD,
    ContradictionError,
    DisksError,
    decoded,
    directory_of,
    ends_there,
    extra_fields,
    find_end,
    normal,
    other_names,
    same_inside,
)
from ckptconv.tensors.moves import File, Packed
from ckptconv.text import brief

# A million tensors take a tenth of these bytes, and half of these members.
MAX_DIRECTORY, MAX_MEMBERS = 1 << 30, 2_000_000
# The most members whose names are not plain: torch gives storages plain names.
MAX_ODD = 100_000
# The most bytes of a member that is read whole; a million tensors take a seventh of this.
MAX_CONTENT = 1 << 30
# Descriptions of checkpoints deflate to a fifth; only extreme repetition shrinks further.
_SMALL, _MAX_RATIO = 1 << 24, 20

# Concurrent requests for distant local headers, and groups of headers in a batch; up to _FEW are read one by one, with
# the bytes around them.
_REQUESTS, _BATCH, _FEW = 8, 16, 4
# With very many members, reading through small tensors in between is also cheaper than a new request.
_MANY, _GAP_AMONG_MANY = 10_000, 1 << 12
# Flags: three kinds of encryption; a patch; sizes and checksum follow the payload; the name is UTF-8.
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_PATCH, _FOLLOWS, _UTF8 = 0x20, 0x8, 0x800
_UNREADABLE = _ENCRYPTED | _PATCH
# Flags that must be the same in the local header and the directory.
_SAID_TWICE = _UNREADABLE | _FOLLOWS
# Lengths of a data descriptor: checksum and two sizes of 4 or 8 bytes, with or without a signature.
_DESCRIPTORS = (12, 16, 20, 24)
# The file attribute that marks a directory.
_IS_DIRECTORY = 0x10
# The disk number that refers to the zip64 field.
_ZIP64_DISK = 0xFFFF
STORED, DEFLATED = 0, 8
METHODS = {DEFLATED: "deflate", 9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstandard", 95: "xz"}


class _Group(NamedTuple):
    """Local headers close to each other: `nbytes` bytes from byte `start` on; `members` are (row, name)."""

    start: int
    nbytes: int
    members: list[tuple[int, bytes]]


class Archive:
    """A zip archive: members one after the other, then the directory.

    It is bytes `start` to `start` + `size` of the file; offsets count from `start`. Its members are held in columns, a
    row for each; `rows` maps names to rows. `prefix` is the prefix of the names of those that are looked up. Raises
    CorruptError for an archive that contradicts itself or is truncated, UnsupportedError for one that is encrypted or
    in several files, LimitError for too many members.
    """

    prefix = ""

    def __init__(self, reader: Reader, start: int = 0, size: int | None = None) -> None:
        size = reader.file.size - start if size is None else size
        self.file = reader.file
        self.start, self.size = start, size
        self.bytes_read = 0
        self._reader = reader
        self._buffer = bytearray()
        # Of a remote file, read the directory along with the end, unless the archive is very large. Of a local file,
        # read only the necessary bytes: those before the end may be other files' data.
        self._read_tail(TAIL if is_remote(self.file.path) else END_RECORDS)
        if not ends_there(self._tail, find_end(self._tail)):
            self._read_tail(TAIL)
        self.rows: dict[str, int] = {}
        # Names that other readers give members.
        self._others: set[str] = set()
        self.headers = array.array("Q")
        self.sizes = array.array("Q")
        self.packed = array.array("Q")
        self.crcs = array.array("I")
        self.methods = array.array("H")
        self.flags = array.array("H")
        self._read_directory()
        self._ends = self._rooms()
        # Offsets of payloads; 0 until the local header is read.
        self.payloads = array.array("Q", bytes(self.sizes.itemsize * len(self.sizes)))

    def corrupt(self, reason: str, hint: str = "") -> CorruptError:
        return CorruptError(f"{self.name} is not a valid zip archive: {reason}.", hint)

    @property
    def name(self) -> str:
        whole = self.size == self.file.size
        return self.file.path if whole else f"{self.file.path} (bytes {self.start} to {self.start + self.size})"

    def _read_tail(self, length: int) -> None:
        self._tail_start = max(self.size - length, 0)
        self._tail = self._reader.read_at(self.start + self._tail_start, self.size - self._tail_start)
        self.bytes_read += len(self._tail)

    def read_at(self, offset: int, length: int) -> bytes:
        """Read bytes of the archive."""
        if offset >= self._tail_start and offset + length <= self.size:
            return self._tail[offset - self._tail_start :][:length]
        self.bytes_read += length
        return self._reader.read_at(self.start + offset, length)

    def _read_near(self, offset: int, length: int) -> bytes | bytearray:
        """Read as `read_at` does, into a buffer that is valid until the next call: allocating one takes longer."""
        if offset >= self._tail_start or length > DESCRIPTIONS:
            return self.read_at(offset, length)
        self._buffer = self._buffer or bytearray(DESCRIPTIONS)
        self._reader.fill(self.start + offset, [memoryview(self._buffer)[:length]])
        self.bytes_read += length
        return self._buffer

    # ---- the directory

    def _directory(self) -> tuple[bytes, int]:
        """Return the directory, and its number of entries."""
        at = find_end(self._tail)
        if not ends_there(self._tail, at):
            raise self.no_directory()
        try:
            self._end, size, count = directory_of(self._tail, at, self._tail_start + at)
        except ContradictionError as reason:
            raise self.corrupt(str(reason)) from None
        except DisksError:
            raise UnsupportedError(
                f"{self.file.path} is one part of a zip archive in several files.", "Join the parts."
            ) from None
        if size > MAX_DIRECTORY or count > MAX_MEMBERS:
            raise LimitError(
                f"{self.file.path}: its directory has {size} bytes and {count} members; at most {MAX_DIRECTORY} bytes "
                f"and {MAX_MEMBERS} members are supported."
            )
        return self.read_at(self._end, size), count

    def no_directory(self) -> CkptconvError:
        """Return the error for a file that does not end with a directory."""
        if not self.read_at(0, min(self.size, len(LOCAL_SIGNATURE))).startswith(LOCAL_SIGNATURE):
            return self.corrupt("it does not begin like a zip archive")
        if END_SIGNATURE in self._tail:
            return self.corrupt(
                "its last end record does not end at the end of the file: the file was cut short, data was appended, "
                "or the comment contains another end record, which only torch reads",
                AGAIN,
            )
        return TruncatedError(
            f"{self.name} is not a valid zip archive: it begins like one, but its {self.size} bytes do not end with a "
            "directory: the file was cut short, or data was appended.",
            AGAIN,
        )

    def _read_directory(self) -> None:
        directory, count = self._directory()
        rows, headers, sizes, packed_sizes = self.rows, self.headers, self.sizes, self.packed
        crcs, methods, all_flags = self.crcs, self.methods, self.flags
        at = 0
        for index in range(count):
            if at + ENTRY.size > len(directory):
                raise self.corrupt(f"its directory ends after {index} of {count} members")
            (
                signature, _, _, flags, method, _, _, crc, packed, size, name_length, extra_length, comment_length,
                disk, _, attributes, header,
            ) = ENTRY.unpack_from(directory, at)  # fmt: skip
            if signature != ENTRY_SIGNATURE:
                raise self.corrupt(f"member {index} of {count} is not at the expected place in the directory")
            at += ENTRY.size
            extra_at = at + name_length
            raw = directory[at:extra_at]
            at = extra_at + extra_length + comment_length
            if at > len(directory):
                raise self.corrupt(f"its directory ends within member {index} of {count}")
            extra = directory[extra_at : extra_at + extra_length] if extra_length else b""
            if ZIP64 in (size, packed, header):
                size, packed, header = self._wide(extra, size, packed, header)
            if not extra and raw.isascii():
                name = raw.decode("ascii")
            else:
                name, flags = self._name_of(raw, flags, extra)
            if name in rows:
                raise self._two_named(name)
            if flags & _UNREADABLE or disk:
                self._check_readable(name, flags, disk)
            if size and (attributes & _IS_DIRECTORY or name[-1:] == "/"):
                # torch reads none of it, and uses uninitialized memory as the storage.
                raise self.corrupt(f"member {brief(name)} of {size} bytes is marked as a directory")
            if not method and packed != size:
                raise self.corrupt(
                    f"member {brief(name)} is stored uncompressed, but in {packed} bytes instead of {size}"
                )
            rows[name] = index
            headers.append(header)
            sizes.append(size)
            packed_sizes.append(packed)
            crcs.append(crc)
            methods.append(method)
            all_flags.append(flags)
        if at != len(directory):
            raise self.corrupt(f"its directory has more than the expected {count} members")

    def _two_named(self, name: str) -> CorruptError:
        return self.corrupt(f"it has two members named {brief(name)}")

    def _check_readable(self, name: str, flags: int, disk: int) -> None:
        """Refuse a member for its flags or its disk number."""
        if flags & _ENCRYPTED:
            raise UnsupportedError(f"{self.name}: member {brief(name)} is encrypted.", "Decrypt it first.")
        if flags & _PATCH:
            raise UnsupportedError(f"{self.name}: member {brief(name)} is a patch for another file.")
        if disk != _ZIP64_DISK:
            raise UnsupportedError(f"{self.name}: member {brief(name)} is in another file, number {disk}.")

    def _wide(self, extra: bytes, *numbers: int) -> list[int]:
        """Replace the numbers that do not fit 32 bits with those of the zip64 field, which has them in this order."""
        fields = [content for kind, content in extra_fields(extra) if kind == ZIP64_FIELD]
        if len(fields) == 1:
            wide = iter(struct.unpack(f"<{len(fields[0]) // 8}Q", fields[0][: len(fields[0]) // 8 * 8]))
            sizes = [next(wide, None) if number == ZIP64 else number for number in numbers]
            if None not in sizes:
                return [number for number in sizes if number is not None]
        raise self.corrupt("a member has a size or offset beyond 4 GiB, but no single zip64 field contains it")

    def _name_of(self, raw: bytes, flags: int, extra: bytes) -> tuple[str, int]:
        """Return a member's name, and its flags, with the UTF-8 flag set if the name is UTF-8.

        Record its names for other readers: no two alike, and each the same but for the leading directory.
        """
        try:
            name = decoded(raw, bool(flags & _UTF8))
        except UnicodeDecodeError:
            raise self.corrupt(f"the name of a member, {brief(raw)}, is not UTF-8") from None
        for alias in other_names(raw, bool(flags & _UTF8), extra):
            if alias != name:
                if alias in self._others or not same_inside(name, alias):
                    raise self.corrupt(f"member {brief(name)} has a different name, {brief(alias)}, for other readers")
                self._others.add(alias)
                self._check_odd(len(self._others))
        return name, flags | _UTF8 if name.encode() == raw else flags

    def _check_odd(self, count: int) -> None:
        if count > MAX_ODD:
            raise LimitError(
                f"{self.name} has more than {MAX_ODD} members whose names other readers may read differently."
            )

    def _rooms(self) -> array.array[int]:
        """Return, for each member, the offset of the next member or the directory: it must end before that."""
        headers = self.headers
        first = min(headers, default=0)
        if first:
            raise self.corrupt(f"it begins with {first} unknown bytes, which other readers may read as another file")
        ends = headers[1:]
        if headers:
            ends.append(self._end)
        # `locate` checks again, with the name and the padding.
        if self._too_close(ends) >= 0:
            # The directory is not in the order of the file, or members overlap.
            order = sorted(range(len(headers)), key=headers.__getitem__)
            for row, after in itertools.pairwise(order):
                ends[row] = headers[after]
            ends[order[-1]] = self._end
            row = self._too_close(ends)
            if row >= 0:
                raise self._overlap(row, ends[row])
        return ends

    def _too_close(self, ends: array.array[int]) -> int:
        """Return the first row whose member and local header do not fit before its end; -1 if all do."""
        rooms = [*map(operator.sub, map(operator.sub, ends, self.headers), self.packed)]
        short = min(rooms, default=LOCAL_HEADER.size) < LOCAL_HEADER.size
        return next(row for row, room in enumerate(rooms) if room < LOCAL_HEADER.size) if short else -1

    def check_names(self, looked_for: Collection[str], folders: tuple[str, ...]) -> None:
        """Refuse members that other readers find under a name that we do not, or confuse with another.

        torch and some file systems ignore case; zipfile drops parts of paths. The name that results, within `prefix`,
        must not be another member's, one of those `looked_for`, nor one in `folders`.
        """
        prefix, rows = self.prefix, self.rows
        both = next((name for name in self._others if name in rows), None)
        if both is not None:
            raise self.corrupt(f"it has two members named {brief(both)} for other readers")
        inside = normal(prefix[:-1]) + "/" if prefix else ""
        seen: set[str] = set()
        for name in itertools.chain(rows, self._others):
            if "\0" in name:
                raise self.corrupt(f"the name of member {brief(name)} contains a NUL, where other readers end the name")
            ours = name.startswith(prefix) and name in rows
            inner = name[len(prefix) :] if ours else ""
            path = normal(inner) if ours else normal(name).removeprefix(inside)
            if path == inner or (name in rows and name.endswith("/")) or not (ours or normal(name).startswith(inside)):
                continue
            if (
                path in seen
                or prefix + path in rows
                or path in looked_for
                or (path.startswith(folders) and not inner.startswith(folders))
            ):
                raise self.corrupt(f"member {brief(name)} is {brief(prefix + path)} for other readers")
            seen.add(path)
            self._check_odd(len(seen))

    def _overlap(self, row: int, end: int) -> CorruptError:
        return self.corrupt(
            f"the member of {self.packed[row]} bytes at byte {self.headers[row]} overlaps the data at byte {end}"
        )

    def is_any_below(self, beginning: str) -> bool:
        """Return whether any member's name begins with `beginning`, which ends in a slash."""
        return any(name.startswith(beginning) for name in self.rows)

    def rows_below(self, *beginnings: str) -> list[int]:
        """Return the rows of the members whose names begin with one of `beginnings`, each of which ends in a slash."""
        return [row for name, row in self.rows.items() if name.startswith(beginnings)]

    # ---- local headers

    def locate_all(self) -> None:
        """Read and check the local headers of all members."""
        self.locate(self.rows.items())

    def locate(self, members: Iterable[tuple[str, int]]) -> None:
        """Read and check the local headers of these members, (name, row).

        Only local headers show where payloads begin: the directory lacks the padding that aligns them.
        """
        for group, window in self._windows(self._groups(members)):
            self._locate_near(group, window)

    def _groups(self, members: Iterable[tuple[str, int]]) -> Iterator[_Group]:
        """Yield the groups of local headers that are read together."""
        gap, headers, flags = max_gap(self.file), self.headers, self.flags
        if len(headers) > _MANY:
            gap = max(gap, _GAP_AMONG_MANY)
        near: list[tuple[int, bytes]] = []
        start = stop = 0
        for name, row in members:
            raw = name.encode("utf-8" if name.isascii() or flags[row] & _UTF8 else "cp437")
            header = headers[row]
            end = header + LOCAL_HEADER.size + len(raw)
            if near and not (stop <= header <= stop + gap and end <= start + DESCRIPTIONS):
                yield self._group(start, stop, near)
                near = []
            if not near:
                start = header
            near.append((row, raw))
            stop = end
        if near:
            yield self._group(start, stop, near)

    def _group(self, start: int, stop: int, members: list[tuple[int, bytes]]) -> _Group:
        if stop > self._end:
            raise self.corrupt("a local header reaches into the directory")
        return _Group(start, stop - start, members)

    def _windows(self, groups: Iterator[_Group]) -> Iterator[tuple[_Group, bytes | bytearray]]:
        """Yield each group with its bytes, valid until the next; of a remote file, request several at a time."""
        if not is_remote(self.file.path):
            yield from ((group, self._read_near(group.start, group.nbytes)) for group in groups)
            return
        first = list(itertools.islice(groups, _FEW + 1))
        if len(first) <= _FEW:
            yield from ((group, self.read_at(group.start, group.nbytes)) for group in first)
            return
        from concurrent.futures import ThreadPoolExecutor

        groups = itertools.chain(first, groups)
        with ThreadPoolExecutor(_REQUESTS) as requests:
            while batch := list(itertools.islice(groups, _BATCH)):
                yield from zip(batch, requests.map(self._fetched, batch), strict=True)
                self.bytes_read += sum(group.nbytes for group in batch)

    def _fetched(self, group: _Group) -> bytearray:
        """Read the bytes of a group, and none around it."""
        data = bytearray(group.nbytes)
        self._reader.fill(self.start + group.start, [memoryview(data)])
        return data

    def _locate_near(self, group: _Group, window: bytes | bytearray) -> None:
        """Store the payload offsets of a group whose local headers `window` begins with."""
        start, _, members = group
        headers, ends, sizes, packed_sizes, crcs = self.headers, self._ends, self.sizes, self.packed, self.crcs
        methods, all_flags, payloads, unpack = self.methods, self.flags, self.payloads, LOCAL_HEADER.unpack_from
        # ZIP64 here refers to the zip64 field, 0 to the descriptor after the payload. 0 does so even without the flag
        # for it: torch.save with skip_data leaves all of the header blank.
        for row, raw in members:
            at = headers[row] - start
            signature, _, flags, method, _, _, crc, packed, size, name_length, extra_length = unpack(window, at)
            at += LOCAL_HEADER.size
            if (
                signature != LOCAL_SIGNATURE
                or name_length != len(raw)
                or not window.startswith(raw, at)
                or method != methods[row]
                or (flags ^ all_flags[row]) & _SAID_TWICE
                or (size and size != ZIP64 and size != sizes[row])
                or (packed and packed != ZIP64 and packed != packed_sizes[row])
                or (crc and crc != crcs[row])
            ):
                raise self._other_member(row, raw)
            at += name_length
            if ZIP64 in (size, packed):
                self._check_wide(row, raw, self.read_at(start + at, extra_length))
            payloads[row] = payload = start + at + extra_length
            room = ends[row] - payload - packed_sizes[row]
            if room:
                if room < 0:
                    raise self._overlap(row, ends[row])
                if room not in _DESCRIPTORS or not flags & _FOLLOWS:
                    raise self.corrupt(
                        f"the {room} bytes from byte {self._ends[row] - room} on belong to no member, but other "
                        "readers may find a member there"
                    )

    def _check_wide(self, row: int, raw: bytes, extra: bytes) -> None:
        """Check the sizes in a local header's zip64 field; 0 says that they follow the payload."""
        fields = [content for kind, content in extra_fields(extra) if kind == ZIP64_FIELD]
        stated = struct.unpack("<2Q", fields[0][:16]) if len(fields) == 1 and len(fields[0]) >= 16 else ()
        if stated not in ((self.sizes[row], self.packed[row]), (0, 0)):
            raise self._other_member(row, raw)

    def _other_member(self, row: int, raw: bytes) -> CorruptError:
        return self.corrupt(
            f"the data at byte {self.headers[row]} is not the member {brief(raw)} that the directory lists",
            "The file is damaged, or data was added or removed.",
        )

    def deflated(self, row: int, name: str) -> File:
        """Return the content of a deflated storage, a member, as a file compressed within this one."""
        from ckptconv.storage.packed import check_ratio  # most archives store their members

        file, size, packed = self.file, self.sizes[row], self.packed[row]
        path = f"{file.path}/{self.prefix}{name}"
        check_ratio(path, packed, size)
        crc = self.crcs[row] if self.crcs[row] or not size else None
        return File(path, size, file.stamp, Packed(file, self.start + self.payloads[row], packed, crc))

    def records(self, rows: Sequence[int]) -> Records:
        """Return the places and checksums of members that are located; of compressed ones, only the checksums."""
        places = self._column(self.payloads, rows)
        if any(map(operator.gt, places, places[1:])):
            rows = sorted(rows, key=self.payloads.__getitem__)
        packed = array.array("I")
        if any(self._column(self.methods, rows)):
            packed.extend(self.crcs[row] for row in rows if self.methods[row])
            rows = [row for row in rows if not self.methods[row]]
        offsets = self._column(self.payloads, rows)
        if self.start:
            offsets = array.array("Q", map(self.start.__add__, offsets))
        return Records(offsets, self._column(self.sizes, rows), self._column(self.crcs, rows), packed)

    @staticmethod
    def _column(column: array.array[int], rows: Sequence[int]) -> array.array[int]:
        """Return the values of a column in `rows`."""
        return array.array(column.typecode, map(column.__getitem__, rows))

    # ---- small members

    def find(self, name: str) -> bytes | None:
        """Return the content of a small member, if it exists."""
        return self.read(name) if self.prefix + name in self.rows else None

    def read(self, name: str, default: bytes | None = None) -> bytes:
        """Return the whole content of the member with this name (without the prefix), after checking its CRC."""
        name = self.prefix + name
        row = self.rows.get(name)
        if row is None:
            if default is None:
                raise self.corrupt(f"it has no member {name[:100]!r}")
            return default
        size, method = self.sizes[row], self.methods[row]
        most = min(MAX_CONTENT, _SMALL + _MAX_RATIO * self.packed[row])
        if size > most:
            raise LimitError(f"{self.file.path}: {name[:100]!r} has {size} bytes; at most {most} are supported.")
        self.locate([(name, row)])
        data = self.read_at(self.payloads[row], self.packed[row])
        if method == DEFLATED:
            data = self._inflated(name, data, size)
        elif method:
            raise UnsupportedError(
                f"{self.file.path}: {name[:100]!r} is compressed ({METHODS.get(method, method)}).",
                "Unpack the archive, and pack it again without compression (zip -0).",
            )
        if self.crcs[row] and zlib.crc32(data) != self.crcs[row]:
            raise self.corrupt(f"{name[:100]!r} does not match its checksum: its content has changed", "Copy it again.")
        return data

    def _inflated(self, name: str, data: bytes, size: int) -> bytes:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            result = inflater.decompress(data, size + 1)
        except zlib.error as error:
            raise self.corrupt(f"{name[:100]!r} cannot be inflated ({error})") from None
        if len(result) != size or not inflater.eof:
            raise self.corrupt(f"{name[:100]!r} does not inflate to the {size} bytes that the directory lists")
        return result
