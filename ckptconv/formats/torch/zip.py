"""Read torch's zip archives (.pt, .pth, .bin, .ckpt since torch 1.6) by ranges: directory and pickle, no data.

Source: `torch/serialization.py` and `caffe2/serialize/inline_container.cc`; the zip format is PKWARE's APPNOTE.TXT. An
archive P.pt has the members P/data.pkl (the description), P/data/KEY (one for each storage), and in newer files
P/byteorder. P is any name; the file may have been renamed since. TorchScript archives before torch 1.3 have
P/model.json and P/tensors/KEY instead.

This code reads the directory, not `zipfile`, which takes four times as long and 600 bytes for each member; there may be
a million. Everything is checked: names, methods, sizes, and that no two members overlap.
"""

from __future__ import annotations

import array
import functools
import itertools
import operator
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.errors import AGAIN, CkptconvError, CorruptError, LimitError, UnsupportedError
from ckptconv.formats.instead import plain_pickle, what_archive_it_is, what_it_is
from ckptconv.formats.torch import LOCAL_SIGNATURE
from ckptconv.formats.torch.container import (
    MAX_PICKLE,
    SCANNED,
    SCRIPT_ATTRIBUTES,
    SCRIPT_DESCRIPTION,
    SCRIPT_RECORDS,
    TorchFile,
    first_identity,
    is_pickle,
)
from ckptconv.formats.torch.objects import FirstDtypes, Storage, StorageId, storage_id, vocabulary
from ckptconv.formats.torch.zip_directory import (
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
    are_plain,
    decoded,
    directory_of,
    ends_there,
    extra_fields,
    find_end,
    normal,
    other_names,
    same_inside,
)
from ckptconv.formats.torch.zip_series import Alike, Series, entries_alike, headers_alike
from ckptconv.pickles.machine import Loaded, load
from ckptconv.pickles.vocabulary import DEFAULT_LIMITS, Limits, MalformedError, RefusedError, TruncatedError, Vocabulary
from ckptconv.storage.coalesce import DESCRIPTIONS, max_gap
from ckptconv.storage.files import Reader
from ckptconv.storage.paths import is_remote
from ckptconv.storage.records import Records
from ckptconv.storage.spool import check_ratio
from ckptconv.tensors.moves import File, Packed
from ckptconv.text import brief, some

if TYPE_CHECKING:
    from ckptconv.formats.torch.script import ScriptWeights

PICKLE = "data.pkl"
_STORAGES = "data/"
# Of TorchScript: what its program holds, and the tensors in that.
_CONSTANTS, _OF_CONSTANTS = "constants.pkl", "constants/"
# A million tensors take a tenth of these bytes, and half of these members.
MAX_DIRECTORY, MAX_MEMBERS = 1 << 30, 2_000_000
# Entries of the directory that are read together if they are alike.
_ALIKE = 256
# Members whose local headers are compared together, at most.
_MOST_ALIKE = 1024
# The most members whose names are not plain: torch gives storages plain names.
_MAX_ODD = 100_000
# Descriptions of checkpoints deflate to a fifth; only extreme repetition shrinks further.
_SMALL, _MAX_RATIO = 1 << 24, 20

# Concurrent requests for distant local headers, and groups of headers in a batch; up to _FEW are read one by one, with
# what is around them.
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
# The names that torch looks up besides storages, in upper or lower case.
_LOOKED_FOR = frozenset(
    (
        PICKLE, "byteorder", _CONSTANTS, "version", ".data/version", ".format_version", ".storage_alignment",
        SCRIPT_DESCRIPTION, SCRIPT_ATTRIBUTES,
    )
)  # fmt: skip
# The file attribute that marks a directory.
_IS_DIRECTORY = 0x10
# The disk number that refers to the zip64 field.
_ZIP64_DISK = 0xFFFF
_STORED, _DEFLATED = 0, 8
_METHODS = {_DEFLATED: "deflate", 9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstandard", 95: "xz"}


def read_zip(reader: Reader, start: int = 0, size: int | None = None, *, limits: Limits = DEFAULT_LIMITS) -> TorchFile:
    """Open a zip archive that torch.save wrote: the whole file, or `size` bytes of it from byte `start`.

    Of a TorchScript archive, return the weights. Raise CorruptError for an archive that contradicts itself or is
    truncated, UnsupportedError for one that is no checkpoint, or whose tensors use an uncommon compression.
    """
    archive = _Archive(reader, start, reader.file.size - start if size is None else size)
    byteorder = archive.read("byteorder", b"little")
    if byteorder not in (b"little", b"big"):
        raise archive.corrupt(f"its byteorder is {byteorder[:20]!r}, not little or big")
    pickle = archive.read(SCRIPT_DESCRIPTION if archive.is_old_script else PICKLE)
    # Check all members: one with a damaged name would pass for an absent storage or byteorder.
    archive.locate_all()
    # Archives without data.pkl are older than the byteorder member.
    storages = _Storages(archive, byteorder == b"big" and not archive.is_old_script)
    where = f"{reader.file.path} ({archive.prefix}{PICKLE})"
    words = vocabulary(storages.resolve, storages.places)
    if archive.is_script:
        from ckptconv.formats.torch import script as torch_script

        words = torch_script.vocabulary(words)
    if archive.is_old_script:
        return _old_script(archive, pickle, words, limits)
    loaded = load(pickle, words, where=where, limits=limits)
    if archive.is_script:
        return _script(archive, loaded, _constants(archive, words, storages, limits), byteorder.decode())
    return TorchFile(
        loaded.value,
        reader.file,
        loaded.opaque,
        loaded.globals,
        byteorder.decode(),
        archive.records(),
        archive.bytes_read,
        "zip archive",
        stem=archive.prefix.removesuffix("/"),
    )


def check_zip(reader: Reader) -> None:
    """Check all of a zip archive but what its pickles say. Raise what `read_zip` raises."""
    archive = _Archive(reader, 0, reader.file.size)
    archive.locate_all()


def _constants(archive: _Archive, words: Vocabulary, storages: _Storages, limits: Limits) -> Any:
    """Return what the program of a TorchScript archive holds: a tuple of constants."""
    own = storages.within(_OF_CONSTANTS)
    pickle = archive.find(_CONSTANTS)
    if pickle is None:
        held: Any = ()
    else:
        words = words._replace(persistent=own.resolve, phrases=None)
        where = f"{archive.file.path} ({archive.prefix}{_CONSTANTS})"
        held = load(pickle, words, where=where, limits=limits).value
    unused = [name for name, row in archive.storages(_OF_CONSTANTS) if row not in own.used and archive.sizes[row]]
    if unused:
        from ckptconv.formats.torch.script import unsupported

        raise unsupported(
            archive.file.path, f"its program alone says what {some(unused, 1)} holds, which {_CONSTANTS} does not"
        )
    return held


def _script(archive: _Archive, loaded: Loaded, constants: Any, byteorder: str) -> TorchFile:
    """Return the weights of a TorchScript archive whose data.pkl holds a module."""
    if archive.prefix + SCRIPT_DESCRIPTION in archive.rows:
        raise archive.corrupt(
            f"it has both {PICKLE} and {SCRIPT_DESCRIPTION}, and which of them counts depends on the release of torch"
        )
    from ckptconv.formats.torch import script as torch_script

    return _weights_file(
        archive, torch_script.weights(loaded.value, constants, archive.find, archive.file.path), loaded, byteorder
    )


def _old_script(archive: _Archive, description: bytes, words: Vocabulary, limits: Limits) -> TorchFile:
    """Return the weights of a TorchScript archive of torch 1.0 to 1.2, which has no data.pkl."""
    from ckptconv.formats.torch import script_json

    def size(key: str) -> int | None:
        row = archive.storage(key, SCRIPT_RECORDS)
        return None if row is None else archive.sizes[row]

    def attributes(words: Vocabulary) -> Loaded:
        name = SCRIPT_ATTRIBUTES
        return load(archive.read(name), words, where=f"{archive.file.path} ({archive.prefix}{name})", limits=limits)

    needed = script_json.Archive(archive.file.path, size, words, attributes)
    return _weights_file(archive, *script_json.weights(description, needed), "little")


def _weights_file(archive: _Archive, weights: ScriptWeights, loaded: Loaded, byteorder: str) -> TorchFile:
    from ckptconv.formats.torch.script import told

    return TorchFile(
        weights.tensors,
        archive.file,
        tuple(cls for cls in loaded.opaque if cls.module.partition(".")[0] != "__torch__"),
        loaded.globals,
        byteorder,
        archive.records(),
        archive.bytes_read,
        "script archive",
        notes=(told(weights.others),) if weights.others else (),
    )


class _Group(NamedTuple):
    """Local headers close to each other: `nbytes` bytes from byte `start` on; `members` are (row, name)."""

    start: int
    nbytes: int
    members: list[tuple[int, bytes]]


class _Storages:
    """Resolves persistent ids to the storages of an archive."""

    def __init__(self, archive: _Archive, swapped: bool, folder: str = "") -> None:
        self._archive = archive
        self._swapped = swapped
        self._folder = folder or archive.folders[0]
        # The rows that `resolve` found.
        self.used: set[int] = set()
        self._first = first_identity()
        # Equal sizes share one int: each tensor holds one.
        self._sizes: dict[int, int] = {}
        # Deflated storages, each as a file of its own.
        self._packed: dict[int, File] = {}
        # None for a script archive with data.pkl: there each tensor's id gives its dtype.
        self._dtypes = None if archive.is_script and not archive.is_old_script else FirstDtypes(len(archive.sizes))

    def within(self, folder: str) -> _Storages:
        """Return the storages in another folder of the archive."""
        return _Storages(self._archive, self._swapped, folder)

    def _agrees(self, row: int, wanted: StorageId) -> bool:
        """Whether torch.load gives this storage this dtype. It makes an empty storage anew each time."""
        return self._dtypes is None or not wanted.numel or self._dtypes.agreeing(wanted.dtype)(row)

    def resolve(self, pid: Any) -> Storage:
        wanted = storage_id(pid)
        archive = self._archive
        if wanted.location == "meta":
            return Storage(archive.file, archive.start, 0, wanted.dtype, wanted.key, None, meta=True)
        nbytes = wanted.numel * wanted.dtype.itemsize
        nbytes = self._sizes.setdefault(nbytes, nbytes)
        row = archive.storage(wanted.key, self._folder)
        if row is None:
            raise MalformedError(f"needs storage {wanted.key[:40]!r} of {nbytes} bytes, which the archive lacks")
        self.used.add(row)
        size, method = archive.sizes[row], archive.methods[row]
        if method not in (_STORED, _DEFLATED):
            raise RefusedError(
                f"needs storage {wanted.key[:40]!r}, which is compressed ({_METHODS.get(method, method)}); "
                "unpack the archive, pack it again without compression (zip -0), and convert that"
            )
        if size != nbytes:
            raise MalformedError(f"needs {nbytes} bytes of storage {wanted.key[:40]!r}, whose record has {size}")
        if not self._agrees(row, wanted):
            raise MalformedError(
                f"has storage {wanted.key[:40]!r} as {wanted.dtype} and as another dtype; torch.load takes it for the "
                "first of them"
            )
        file, offset = archive.file, archive.start + archive.payloads[row]
        if method:
            if row not in self._packed:
                self._packed[row] = archive.deflated(row, self._folder + wanted.key)
            file, offset = self._packed[row], 0
        return Storage(file, offset, nbytes, wanted.dtype, wanted.key, self._first + row, swapped=self._swapped)

    def places(self, wanted: StorageId) -> Callable[[Sequence[str]], tuple[File, Sequence[int], Sequence[int]]] | None:
        """Return a function that finds the storages that differ from `wanted` only in their keys and are stored as they
        are used; None if none can be."""
        if wanted.location == "meta" or self._swapped:
            return None
        archive, identity, dtypes = self._archive, self._first, self._dtypes if wanted.numel else None
        rows, prefix, sizes, methods = archive.rows, archive.prefix + self._folder, archive.sizes, archive.methods
        nbytes = wanted.numel * wanted.dtype.itemsize
        agrees = dtypes.agreeing(wanted.dtype) if dtypes else None

        def fits(row: int | None) -> bool:
            return row is not None and sizes[row] == nbytes and methods[row] == _STORED and (not agrees or agrees(row))

        def place(keys: Sequence[str]) -> tuple[File, Sequence[int], Sequence[int]]:
            names = [*map(prefix.__add__, keys)]
            first = rows.get(names[0], len(rows))
            stop = first + len(names)
            found: Sequence[int] = range(first, stop)
            # Mostly they follow one another as their tensors do.
            if not (
                len(names) > 1
                and archive.names[first:stop] == names
                and sizes[first:stop].count(nbytes) == len(names)
                and not any(methods[first:stop])
                and (not dtypes or dtypes.are_first(wanted.dtype, first, stop))
            ):
                found = [row for row in itertools.takewhile(fits, map(rows.get, names)) if row is not None]
            payloads = (
                archive.payloads[first:stop] if type(found) is range else [*map(archive.payloads.__getitem__, found)]
            )
            return archive.file, [*map(archive.start.__add__, payloads)], [*map(identity.__add__, found)]

        return place


# ------------------------------------------------------------------------------------------------------ the archive


class _Archive:
    """A zip archive as torch writes it: members one after the other, then the directory.

    It is bytes `start` to `start` + `size` of the file; offsets count from `start`. Its members are held in columns, a
    row for each; `rows` maps names to rows. `prefix` is the prefix of all members' names.
    """

    def __init__(self, reader: Reader, start: int, size: int) -> None:
        self.file = reader.file
        self.start, self.size = start, size
        self.bytes_read = 0
        self._reader = reader
        self._buffer = bytearray()
        # Of a remote file, read the directory along with the end, unless the archive is very large. Of a local file,
        # read only what is needed: what precedes the end may be other files' data.
        self._read_tail(TAIL if is_remote(self.file.path) else END_RECORDS)
        if not ends_there(self._tail, find_end(self._tail)):
            self._read_tail(TAIL)
        self.rows: dict[str, int] = {}
        # The members that are in series, which need no look at each of their names, and the names of all others.
        self._series: list[Series] = []
        self._single: list[str] = []
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
        old = self._old_script_prefix()
        self.is_old_script = old is not None
        self.prefix = self._prefix() if old is None else old
        # Where storages are: those of the state first.
        self.folders = (SCRIPT_RECORDS,) if self.is_old_script else (_STORAGES, _OF_CONSTANTS)
        self._check_names()
        # Whether it is a TorchScript archive: a program with its weights.
        self.is_script = self.is_old_script or self._has_code()

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of all members, by row."""
        return [*self.rows]

    def corrupt(self, reason: str, hint: str = "") -> CorruptError:
        return CorruptError(f"{self._name} is not a sound zip archive: {reason}.", hint)

    @property
    def _name(self) -> str:
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
        """Read as `read_at` does, into the beginning of a buffer valid until the next call: allocating one takes longer
        than reading."""
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
            raise self._no_directory()
        try:
            self._end, size, count = directory_of(self._tail, at, self._tail_start + at)
        except ContradictionError as reason:
            raise self.corrupt(str(reason)) from None
        except DisksError:
            raise UnsupportedError(
                f"{self.file.path} is a part of a zip archive that spans several files.", "Join them."
            ) from None
        if size > MAX_DIRECTORY or count > MAX_MEMBERS:
            raise LimitError(
                f"{self.file.path}: its directory has {size} bytes, of {count} members; at most {MAX_DIRECTORY} bytes "
                f"of {MAX_MEMBERS} members are read."
            )
        return self.read_at(self._end, size), count

    def _no_directory(self) -> CkptconvError:
        head = self.read_at(0, min(self.size, 512))
        what = what_it_is(head, self.size)
        if what is None and is_pickle(self.read_at(0, min(self.size, SCANNED)), self._name):
            what = plain_pickle()
        if what:
            return type(what)(f"{self.file.path} {what.message}", what.hint)
        if head.startswith(LOCAL_SIGNATURE):
            if END_SIGNATURE in self._tail:
                return self.corrupt(
                    "the last end record in it does not reach its end: it was cut short, something was appended, or "
                    "its comment contains another end record, which torch takes and other readers do not",
                    AGAIN,
                )
            return TruncatedError(
                f"{self._name} is not a sound zip archive: it begins like one, but its {self.size} bytes do not end "
                "with a directory: it was cut short, or something was appended.",
                AGAIN,
            )
        return CorruptError(
            f"{self.file.path} is not a torch checkpoint: it is no zip archive, and begins with {head[:16]!r}.",
            "Check where it came from: it may not be what its name says.",
        )

    def _read_directory(self) -> None:
        directory, count = self._directory()
        rows, headers, sizes, packed_sizes = self.rows, self.headers, self.sizes, self.packed
        crcs, methods, all_flags = self.crcs, self.methods, self.flags
        at = index = alone = 0
        while index < count:
            if index >= alone:
                if size := self._read_alike(directory, at, count - index):
                    index, at = index + _ALIKE, at + size
                    continue
                alone = index + _ALIKE
            if at + ENTRY.size > len(directory):
                raise self.corrupt(f"its directory ends after {index} of {count} members")
            (
                signature, _, _, flags, method, _, _, crc, packed, size, name_length, extra_length, comment_length,
                disk, _, attributes, header,
            ) = ENTRY.unpack_from(directory, at)  # fmt: skip
            if signature != ENTRY_SIGNATURE:
                raise self.corrupt(f"member {index} of {count} is not in the directory where it should be")
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
                raise self.corrupt(f"member {brief(name)} is stored, in {packed} bytes for {size}")
            rows[name] = index
            self._single.append(name)
            headers.append(header)
            sizes.append(size)
            packed_sizes.append(packed)
            crcs.append(crc)
            methods.append(method)
            all_flags.append(flags)
            index += 1
        if at != len(directory):
            raise self.corrupt(f"its directory has more in it than the {count} members it should have")

    def _read_alike(self, directory: bytes, at: int, most: int) -> int:
        """Read a number of entries of the directory together, from byte `at` on, and return how many bytes they are; 0
        if there are fewer, or not all are of one length and as torch writes them."""
        size = ENTRY.size + int.from_bytes(directory[at + 28 : at + 30], "little")
        block = directory[at : at + _ALIKE * size]
        alike = entries_alike(block, size) if most >= _ALIKE and len(block) == _ALIKE * size else None
        if alike is None or alike.flags & _UNREADABLE:
            return 0
        rows, known = self.rows, len(self.rows)
        rows.update(zip(alike.names, range(known, known + _ALIKE), strict=True))
        if len(rows) != known + _ALIKE:
            names = Counter([*itertools.islice(rows, known), *alike.names])
            raise self._two_named(next(name for name in alike.names if names[name] > 1))
        self._note_series(alike, known)
        self.headers += alike.headers
        self.sizes += alike.sizes
        self.packed += alike.sizes
        self.crcs += alike.crcs
        self.methods.frombytes(bytes(self.methods.itemsize * _ALIKE))
        self.flags += array.array("H", [alike.flags]) * _ALIKE
        return len(block)

    def _note_series(self, alike: Alike, row: int) -> None:
        """Note that the entries from `row` on are a series, or go on with one; or that they are none."""
        if not alike.head:
            self._single.extend(alike.names)
            return
        digits = len(alike.names[0]) - len(alike.head)
        last = self._series.pop() if self._series else Series("", 0, row, row)
        if last[:2] == (alike.head, digits) and last.stop == row:
            self._series.append(last._replace(stop=row + _ALIKE))
        else:
            self._series += [*([last] if last.head else []), Series(alike.head, digits, row, row + _ALIKE)]

    def _two_named(self, name: str) -> CorruptError:
        return self.corrupt(f"it has two members named {brief(name)}")

    def _check_readable(self, name: str, flags: int, disk: int) -> None:
        """Refuse a member for its flags or its disk number."""
        if flags & _ENCRYPTED:
            raise UnsupportedError(f"{self._name}: member {brief(name)} is encrypted.", "Decrypt it first.")
        if flags & _PATCH:
            raise UnsupportedError(f"{self._name}: member {brief(name)} is a patch of another file.")
        if disk != _ZIP64_DISK:
            raise UnsupportedError(f"{self._name}: member {brief(name)} is in another file, number {disk}.")

    def _wide(self, extra: bytes, *numbers: int) -> list[int]:
        """Replace the numbers that do not fit 32 bits with those of the zip64 field, which has them in this order."""
        fields = [content for kind, content in extra_fields(extra) if kind == ZIP64_FIELD]
        if len(fields) == 1:
            wide = iter(struct.unpack(f"<{len(fields[0]) // 8}Q", fields[0][: len(fields[0]) // 8 * 8]))
            found = [next(wide, None) if number == ZIP64 else number for number in numbers]
            if None not in found:
                return [number for number in found if number is not None]
        raise self.corrupt("a member is larger than 4 GiB, but its size is missing, or there twice")

    def _name_of(self, raw: bytes, flags: int, extra: bytes) -> tuple[str, int]:
        """Return a member's name, and its flags, with the UTF-8 flag set if the name is UTF-8.

        Record what other readers call it: no two alike, and each the same but for the leading directory.
        """
        try:
            name = decoded(raw, bool(flags & _UTF8))
        except UnicodeDecodeError:
            raise self.corrupt(f"the name of a member, {brief(raw)}, is not UTF-8") from None
        for other in other_names(raw, bool(flags & _UTF8), extra):
            if other != name:
                if other in self._others or not same_inside(name, other):
                    raise self.corrupt(f"member {brief(name)} is called {brief(other)} by other readers")
                self._others.add(other)
                self._check_odd(len(self._others))
        return name, flags | _UTF8 if name.encode() == raw else flags

    def _check_odd(self, count: int) -> None:
        if count > _MAX_ODD:
            raise LimitError(
                f"{self._name} has more than {_MAX_ODD} members whose names other readers may take for others."
            )

    def _rooms(self) -> array.array[int]:
        """Return, for each member, the offset of the next member or the directory: it must end before that."""
        headers = self.headers
        first = min(headers, default=0)
        if first:
            raise self.corrupt(
                f"it begins with {first} bytes that are no part of it, which other readers take for a file of their own"
            )
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
        """Return the first row whose member and local header are longer than what there is up to its end; or -1."""
        rooms = [*map(operator.sub, map(operator.sub, ends, self.headers), self.packed)]
        short = min(rooms, default=LOCAL_HEADER.size) < LOCAL_HEADER.size
        return next(row for row, room in enumerate(rooms) if room < LOCAL_HEADER.size) if short else -1

    def _old_script_prefix(self) -> str | None:
        """Return the names' prefix in a TorchScript archive whose description is no pickle; None for other archives."""
        top, slash, _ = next(iter(self.rows), "").partition("/")
        prefix = top + slash
        is_one = slash and all(prefix + name in self.rows for name in (SCRIPT_DESCRIPTION, "version"))
        return prefix if is_one and prefix + PICKLE not in self.rows else None

    def _prefix(self) -> str:
        """Return the prefix of all members' names, that of the member that is the pickle.

        torch names the outermost directory after the file that it wrote, which may have been renamed.
        """
        # Compare as readers do that ignore case and kinds of slashes.
        pickles = [name for name in self._single if name[-len(PICKLE) :].lower() == PICKLE]
        found = [name for name in pickles if normal(name).rpartition("/")[2] == PICKLE]
        # A storage may have any key: the outermost member of that name is the pickle.
        found.sort(key=len)
        inside = found[0][: -len(PICKLE)].lower() + _STORAGES if found else ""
        outermost = [name for name in found if not name.lower().startswith(inside)]
        if not outermost:
            self._refuse_other_archive()
        if len(outermost) != 1:
            kind = CorruptError if outermost else UnsupportedError
            what = f"{len(outermost)} members named {PICKLE}" if outermost else f"no member named {PICKLE}"
            few = ", ".join(name[:60] for name in itertools.islice(self.rows, 5))
            raise kind(
                f"{self._name} is a zip archive, but not one of torch.save: it has {what} among its "
                f"{len(self.rows)} members ({few}{', …' if len(self.rows) > 5 else ''})."
            )
        # torch looks in the top directory of the first member.
        top, slash, _ = next(iter(self.rows)).partition("/")
        theirs = f"{top}/{PICKLE}".lower()
        for name in found:
            if slash and name.lower() == theirs and name != outermost[0]:
                raise self.corrupt(f"torch takes {brief(name)} for its description, and others {brief(outermost[0])}")
        prefix = outermost[0][: -len(PICKLE)]
        if outermost[0] != prefix + PICKLE or prefix[-1:] not in ("", "/"):
            raise self.corrupt(f"its {PICKLE} is called {brief(outermost[0])}, and not all readers find it")
        return prefix

    def _refuse_other_archive(self) -> None:
        """Raise UnsupportedError that names the kind of an archive not from torch.save, if its members tell."""
        known = what_archive_it_is(self.rows)
        if known:
            raise UnsupportedError(f"{self._name} is {known[0]}, not a file of torch.save.", known[1])

    def _check_names(self) -> None:
        """Refuse members that other readers find under a name that we do not, or confuse with another.

        torch and some file systems ignore case; zipfile drops parts of paths. The name that results, within the
        archive's directory, must not be another member's, nor one that torch looks up.
        """
        prefix, rows = self.prefix, self.rows
        if not self._others and are_plain([*self._single, *(f"{each.head}0" for each in self._series)], prefix):
            return
        both = next((name for name in self._others if name in rows), None)
        if both is not None:
            raise self.corrupt(f"it has two members named {brief(both)} for other readers")
        inside = normal(prefix[:-1]) + "/" if prefix else ""
        seen: set[str] = set()
        for name in itertools.chain(rows, self._others):
            if "\0" in name:
                raise self.corrupt(f"the name of member {brief(name)} has a NUL in it, where other readers end it")
            own = name.startswith(prefix) and name in rows
            inner = name[len(prefix) :] if own else ""
            found = normal(inner) if own else normal(name).removeprefix(inside)
            if found == inner or (name in rows and name.endswith("/")) or not (own or normal(name).startswith(inside)):
                continue
            if (
                found in seen
                or prefix + found in rows
                or found in _LOOKED_FOR
                or (found.startswith(self.folders) and not inner.startswith(self.folders))
            ):
                raise self.corrupt(f"member {brief(name)} is {brief(prefix + found)} for other readers")
            seen.add(found)
            self._check_odd(len(seen))

    def _has_code(self) -> bool:
        names, code = [*self._single, *(each.head for each in self._series)], itertools.repeat(self.prefix + "code/")
        return self.prefix + "constants.pkl" in self.rows or any(map(str.startswith, names, code))

    def _overlap(self, row: int, end: int) -> CorruptError:
        return self.corrupt(
            f"the member of {self.packed[row]} bytes at byte {self.headers[row]} overlaps what is at byte {end}"
        )

    # ---- local headers

    def locate_all(self) -> None:
        """Read and check the local headers of all members."""
        names, done = self.names, 0
        for series in () if is_remote(self.file.path) else self._series:
            self.locate(zip(names[done : series.first], range(done, series.first), strict=True))
            done = series.stop
            self._locate_series(series.first, done)
        self.locate(zip(names[done:], range(done, len(names)), strict=True))

    def _locate_series(self, row: int, end: int) -> None:
        """Locate the members of rows `row` to `end`, which are in a series, as many at once as are alike."""
        while row < end:
            start, size, distance = self.headers[row], self.sizes[row], self._ends[row] - self.headers[row]
            count = min(end - row, _MOST_ALIKE, max(DESCRIPTIONS // distance, 1))
            stop = row + count
            names = self.names[row:stop]
            if (
                count > 2
                and self.headers[row:stop] == array.array("Q", range(start, start + count * distance, distance))
                and self._ends[row : stop - 1] == self.headers[row + 1 : stop]
                and self.sizes[row:stop].count(size) == self.flags[row:stop].count(self.flags[row]) == count
            ):
                last = start + distance * (count - 1) + LOCAL_HEADER.size + len(names[0])
                group = self._group(start, last, [(row, names[0].encode()), (stop - 1, names[-1].encode())])
                window = self._read_near(group.start, group.nbytes)
                if headers_alike(window, distance, names, self.crcs[row:stop]):
                    # What is true of the first is of all, but that something else comes after the last.
                    self._locate_near(group, window)
                    at = self.payloads[row]
                    self.payloads[row:stop] = array.array("Q", range(at, at + count * distance, distance))
                    row = stop
                    continue
            self.locate(zip(names, range(row, stop), strict=True))
            row = stop

    def locate(self, members: Iterable[tuple[str, int]]) -> None:
        """Read and check the local headers of these members, (name, row).

        Only they tell where a payload begins: the padding that aligns it is in the local header, not in the directory.
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
                        f"{room} bytes from byte {self._ends[row] - room} on belong to no member, where other readers "
                        "may find one"
                    )

    def _check_wide(self, row: int, raw: bytes, extra: bytes) -> None:
        """Check the sizes in a local header's zip64 field; 0 says that they follow the payload."""
        fields = [content for kind, content in extra_fields(extra) if kind == ZIP64_FIELD]
        told = struct.unpack("<2Q", fields[0][:16]) if len(fields) == 1 and len(fields[0]) >= 16 else ()
        if told not in ((self.sizes[row], self.packed[row]), (0, 0)):
            raise self._other_member(row, raw)

    def _other_member(self, row: int, raw: bytes) -> CorruptError:
        return self.corrupt(
            f"what is at byte {self.headers[row]} is not the member {brief(raw)} that the directory says",
            "The file is damaged, or something was added to it or taken out.",
        )

    def storages(self, *folders: str) -> Iterator[tuple[str, int]]:
        """Return the members that hold storages, in all folders or some, as (name, row)."""
        beginnings = tuple(self.prefix + folder for folder in folders or self.folders)
        return (member for member in self.rows.items() if member[0].startswith(beginnings))

    def storage(self, key: str, folder: str) -> int | None:
        """Return the row of the storage with this key."""
        return self.rows.get(self.prefix + folder + key)

    def deflated(self, row: int, name: str) -> File:
        """Return the content of a deflated storage, a member, as a file compressed within this one."""
        file, size, packed = self.file, self.sizes[row], self.packed[row]
        path = f"{file.path}/{self.prefix}{name}"
        check_ratio(path, packed, size)
        crc = self.crcs[row] if self.crcs[row] or not size else None
        return File(path, size, file.stamp, Packed(file, self.start + self.payloads[row], packed, crc))

    def records(self) -> Records:
        """Return the storages' places and checksums; of compressed ones, only the checksums."""
        beginnings = tuple(self.prefix + folder for folder in self.folders)
        found = [self.rows[name] for name in self._single if name.startswith(beginnings)]
        for series in self._series:
            found.extend(range(series.first, series.stop) if series.head.startswith(beginnings) else ())
        found.sort()
        rows: Sequence[int] = found
        if found and found[-1] - found[0] == len(found) - 1:
            # No row is there twice: they follow one another, as mostly.
            rows = range(found[0], found[-1] + 1)
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
        """Return what a column has in `rows`; of a range by one copy."""
        if isinstance(rows, range):
            return column[rows.start : rows.stop]
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
        most = min(MAX_PICKLE, _SMALL + _MAX_RATIO * self.packed[row])
        if size > most:
            raise LimitError(f"{self.file.path}: {name[:100]!r} has {size} bytes; at most {most} are read.")
        self.locate([(name, row)])
        data = self.read_at(self.payloads[row], self.packed[row])
        if method == _DEFLATED:
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
