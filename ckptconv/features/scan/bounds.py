"""Bounds on the bytes read of a file, and on members of archives that are too long to hold, or too short to matter."""

from __future__ import annotations

import io
import itertools
import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptconv.errors import CkptconvError, LimitError, UnsafeError
from ckptconv.features.attacks import zip_entries
from ckptconv.features.consecutive.pickles import LongError, Pickles
from ckptconv.features.scan.seekable import Seekable
from ckptconv.formats.torch.zip import PICKLE
from ckptconv.pickles.vocabulary import WHOLE_TREES
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.inside import leads_out
from ckptconv.storage.reading import Reader
from ckptconv.storage.zip_directory import END, END64, END64_SIGNATURE, END_RECORDS, END_SIGNATURE
from ckptconv.text import brief

# The most members of a tar archive that are judged.
MEMBERS = 100_000
# The most bytes of headers before a member of a tar archive, and the most values that hold for all of its members:
# tarfile reads a header as a whole, however long, and copies these values for each member.
_HEADERS, _FOR_ALL = 1 << 20, 1_000
# Longer pickles are judged without being held.
LONGEST = 1 << 19
LIMITS = WHOLE_TREES._replace(objects=300_000)
# The most bytes of a compressed pickle of torch that its reader unpacks.
_COMPRESSED = 1 << 16
STORED = 0
# The end of the names of files of archives one after another, as torch.distributed.checkpoint has them.
ENTRIES = ".distcp"
# Suffixes of files that should be checkpoints or pickles: if such a file is not read, it is not judged.
SUFFIXES = (
    ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".safetensors", ENTRIES, ".pt2", ".ptl", ".joblib", ".dill", ".npy",
    ".npz", ".mar", ".nemo", ".p", ".t7", ".torch", ".sav",
)  # fmt: skip
_SUFFIXES = tuple(suffix.encode() for suffix in SUFFIXES)
# The fewest bytes of a pickle that calls something: two names of one letter, their lines' ends, and three opcodes.
_SHORTEST = 7
# Last parts of the names of members by which torch's own readers recognize an archive; and the members of its tar
# archives.
_OF_TORCH = frozenset({PICKLE.encode(), b"model.json", b"constants.pkl"})
# Ends of names that show the kind of an archive.
_TELLING = (*_OF_TORCH, b".pkl", b".npy", b"archive_format", b"extern_modules")


@dataclass
class Room:
    """The remaining room for judging a file: archives inside archives may overlap, and grow without end."""

    members: int = 1_000_000
    bytes: int = 1 << 30
    stored: int = -1
    places: set[tuple[str, int, int]] = field(default_factory=set)

    def open(self, size: int) -> None:
        """Set the room for a file of `size` bytes, if it is the outermost."""
        if self.stored < 0 and self.members == Room.members:
            self.stored = 2 * size + (1 << 20)

    def spend(self, nbytes: int = 0) -> bool:
        """Count a member of `nbytes` unpacked bytes. Return whether there was room for it."""
        self.members -= 1
        self.bytes -= nbytes
        return self.members >= 0 and self.bytes >= 0


class Listed(NamedTuple):
    """The kind of a zip archive, by the names in its directory."""

    members: int
    is_torch: bool
    is_other: bool
    is_package: bool
    has_long: bool


def listed(reader: Reader) -> Listed:
    members, flags = 0, [False] * 4
    for entry in zip_entries.entries(reader):
        members += 1
        name = entry.name.lower()
        if not name.endswith(_TELLING):
            continue
        name = name.replace(b"\\", b"/")
        flags[0] |= name.rpartition(b"/")[2] in _OF_TORCH
        flags[1] |= name.endswith((b".npy", b"/archive_format"))
        flags[2] |= name.endswith(b".data/extern_modules")
        flags[3] |= is_long(entry)
    return Listed(members, *flags)


def is_long(entry: zip_entries.ZipEntry) -> bool:
    """Return whether a member of an archive is a pickle that torch reads, and too long to be held."""
    is_main = entry.name.rpartition(b"/")[2] in _OF_TORCH and entry.name.endswith(b".pkl")
    return is_main and entry.packed > (LONGEST if entry.method == STORED else _COMPRESSED)


def is_short(entry: zip_entries.ZipEntry) -> bool:
    """Return whether a member of an archive is too short to run anything, and not expected to be a pickle."""
    return entry.method == STORED and 0 < entry.packed < _SHORTEST and not entry.name.endswith(_SUFFIXES)


def has_long(reader: Reader) -> bool:
    """Return whether the object in a stream of torch is a pickle that is too long to be held."""
    if reader.file.size <= LONGEST:
        return False
    pickles = Pickles(reader, 0, reader.file.size, LIMITS, longest=LONGEST)
    try:
        for part in ("the magic number", "the machine description", "the facts about the machine", "the object"):
            pickles.load(part)
    except LongError:
        return True
    except CkptconvError:
        pass
    return False


def members_of(reader: Reader) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of the files in a tar archive, as Python's tarfile finds them. The size of a sparse
    file, whose bytes lie elsewhere, is -1.

    Raises UnsafeError for a file, or a link, that leads out of the archive, LimitError for headers that are much longer
    than those of other archives, and the errors of tarfile.
    """
    file = _Headers(Seekable(reader))
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in itertools.islice(archive, MEMBERS + 1):
                # Otherwise tarfile keeps all members.
                archive.members = []  # type: ignore[attr-defined]
                if len(archive.pax_headers) > _FOR_ALL:
                    raise LimitError(
                        f"{reader.file.path} has more than {_FOR_ALL} header values that apply to all members."
                    )
                _check_inside(member, reader.file.path)
                if member.isreg():
                    yield member.name, member.offset_data, -1 if member.issparse() else member.size
                file.left = _HEADERS
    except (_LongError, RecursionError):
        raise LimitError(f"{reader.file.path} has a member with headers above the size limit.") from None


def _check_inside(member: tarfile.TarInfo, path: str) -> None:
    aim = posixpath.join(posixpath.dirname(member.name), member.linkname) if member.issym() else member.linkname
    why = leads_out(posixpath.normpath(member.name)) or (aim and leads_out(posixpath.normpath(aim)))
    if why and (member.isreg() or member.islnk() or member.issym()):
        raise UnsafeError(
            f"{path} contains the member {brief(member.name)}, whose path leads out of the archive: {why}.", ""
        )


def start_of_last(reader: Reader, end: int) -> int | None:
    """Return where the zip archive begins that ends at byte `end`, without a comment; None if there is none."""
    tail = reader.read_at(max(end - END_RECORDS, 0), min(end, END_RECORDS))
    if tail[-END.size : -END.size + 4] != END_SIGNATURE:
        return None
    _, _, _, _, _, size, start, _ = END.unpack(tail[-END.size :])
    above = END.size
    if len(tail) == END_RECORDS and tail.startswith(END64_SIGNATURE):
        size, start = END64.unpack_from(tail)[8:]
        above = END_RECORDS
    # A directory states its place from the beginning of its own archive.
    begin = end - above - size - start
    return begin if begin >= 0 and reader.read_at(begin, len(LOCAL_SIGNATURE)) == LOCAL_SIGNATURE else None


class _LongError(Exception):
    """The headers of a member are longer than the limit."""


class _Headers(io.BufferedReader):
    """A tar archive, of which tarfile reads only headers. `left` is the number of bytes that it may still read."""

    left = _HEADERS

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= self.left:
            raise _LongError
        self.left -= size
        return super().read(size)
