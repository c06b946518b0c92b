"""Files that two readers read differently: torch (miniz), Python's zipfile, tarfile and pickle. All are refused.

Live ones hold an attack that torch.load runs, and a sound checkpoint where another reader looks.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from .assemble import (
    DATA,
    NONE,
    Member,
    listed,
    mapped,
    members,
    name,
    number,
    pickled,
    several,
    storage,
    tensor,
    text,
    wide,
    zipped,
)
from .corpus import CORRUPT, DONE, OTHER, UNSAFE, UNSUPPORTED, Case, M, P, evil

READERS: dict[str, Case] = {}
PICKLE, ORDER, STORED, VERSION = M
Make = Callable[[str], bytes]


def _add(exit_code: int, file: str, why: str, made: bytes | Make, live: bool = False) -> None:
    assert file not in READERS, file
    make = made if callable(made) else lambda canary: made
    READERS[file] = Case(f"two_{file}.pt", "readers", exit_code, why, make, live=live, whole=True)


def _live(file: str, why: str, made: Make) -> None:
    """torch.load runs an attack in it."""
    _add(UNSAFE, file, why, made, live=True)


# ------------------------------------------------------------------------------------------------- zip: end records


def parts_of(archive: bytes) -> tuple[bytes, bytes]:
    """The members of an archive, and its directory."""
    start, size = struct.unpack_from("<2I", archive, len(archive) - 22 + 12)[::-1]
    return archive[:start], archive[start : start + size]


def end_record(count: int, size: int, start: int, comment: int = 0) -> bytes:
    return struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, start, comment)


def attacked(canary: str, before: bytes = b"") -> tuple[bytes, bytes, int]:
    """An archive that is an attack: its members, its directory, their number. It knows that `before` is before it."""
    parts = members(evil(canary))
    body, directory = parts_of(zipped(parts, before=before))
    return body[len(before) :], directory, len(parts)


def in_the_comment(canary: str, length: int | None, after: bytes = b"") -> bytes:
    """A sound archive, in whose comment is another; the end record of that says `length` for its comment."""
    sound = zipped(M)
    body, directory, count = attacked(canary, sound)
    place = len(sound) + len(body)
    last = end_record(count, len(directory), place, len(after) if length is None else length)
    comment = body + directory + last + after
    return sound[:-2] + struct.pack("<H", len(comment)) + comment


_live(
    "end_short", "an end record in the comment that ends before it", lambda canary: in_the_comment(canary, 0, b"x" * 40)
)
_live("end_long", "an end record in the comment that goes beyond it", lambda canary: in_the_comment(canary, 99))
_live("end_fits", "an end record in the comment that ends with it", lambda canary: in_the_comment(canary, None))
_add(CORRUPT, "end_empty", "an end record of no members in the comment", zipped(M, comment=b"PK\5\6" + bytes(30)))
_add(DONE, "end_cut", "a comment that begins as an end record does", zipped(M, comment=b"hello PK\5\6 hello"))
_add(DONE, "end_in_the_end", "a directory at byte 0x06054b50, if there is as much",
     zipped(M, comment=b"a comment of PK\1\2 and PK\3\4"))  # fmt: skip


def two_directories(canary: str, *, where: bool) -> bytes:
    """Two directories, of which the zip64 records mean the second; or, with `where`, two such records."""
    body, directory = parts_of(zipped(M))
    bad_body, bad_directory, count = attacked(canary, body)

    def record(size: int, start: int) -> bytes:
        return struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)

    front = body + bad_body
    start = len(front)
    if where:
        pointed = record(len(bad_directory), start)
        front += bad_directory + pointed
        place, start = len(front) - len(pointed), len(front)
        front += directory + record(len(directory), start)
    else:
        # The directory that the end record means ends where it does not have to.
        front += directory + bad_directory
        place = len(front)
        front += record(len(bad_directory), start + len(directory))
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, place, 1)
    return front + locator + end_record(count, len(directory), start)


_live("zip64_and_not", "another directory in the zip64 record than in the end record",
      lambda canary: two_directories(canary, where=False))  # fmt: skip
_live("zip64_twice", "a locator that points to another zip64 record than the one before it",
      lambda canary: two_directories(canary, where=True))  # fmt: skip
_add(DONE, "zip64", "zip64 records and true numbers in the end record as well",
     wide(M)[:-22] + end_record(4, len(parts_of(zipped(M))[1]), len(parts_of(zipped(M))[0])))  # fmt: skip
_add(
    CORRUPT,
    "zip64_count",
    "another number of members in the end record",
    wide(M)[:-22] + end_record(3, 0xFFFFFFFF, 0xFFFFFFFF),
)
_sound = zipped(M)
_at = _sound.index(b"PK\1\2") + 34
_add(UNSUPPORTED, "disk", "a member that lies on another disk", _sound[:_at] + b"\1\0" + _sound[_at + 2 :])

# ------------------------------------------------------------------------------------- zip: before and between members


def behind(front: Make) -> Make:
    """An archive with something before it that its numbers know of."""
    return lambda canary: zipped(M, before=front(canary))


_live("pickle_before", "a pickle before an archive that knows of it", behind(evil))
_live(
    "pickle_before_zeros", "a pickle and much else before an archive", behind(lambda canary: evil(canary) + bytes(9999))
)
_live("protocol_0_before", "a pickle of protocol 0 before an archive",
      behind(lambda canary: b"cos\nsystem\n(S\"touch '" + canary.encode() + b"'\"\ntR."))  # fmt: skip
_add(CORRUPT, "member_before", "a member before the first that the directory has",
     zipped(M, before=parts_of(zipped([PICKLE.changed(data=pickled(NONE))]))[0]))  # fmt: skip
_add(CORRUPT, "byte_before", "one byte before an archive", zipped(M, before=b"\n"))


def between(hole: bytes, flags: int = 0x800, at: int = 1) -> bytes:
    """An archive with something between two members."""
    parts = [part.changed(flags=flags) for part in M]
    front, back = parts_of(zipped(parts[:at]))[0], parts_of(zipped(parts))
    body = front + hole + back[0][len(front) :]
    directory = bytearray()
    for index, part in enumerate(parts):
        alone = parts_of(zipped([part]))[1]
        place = len(parts_of(zipped(parts[:index]))[0]) + (len(hole) if index >= at else 0)
        directory += alone[:42] + struct.pack("<I", place) + alone[46:]
    return body + directory + end_record(len(parts), len(directory), len(body))


_HIDDEN = parts_of(zipped([Member("archive/data/0", OTHER)]))[0]
_add(CORRUPT, "hole", "a hole between two members", between(bytes(100)))
_add(CORRUPT, "hole_last", "a hole before the directory", between(bytes(13), at=4))
_add(CORRUPT, "hidden", "a member between two that the directory lacks", between(_HIDDEN))
_add(CORRUPT, "hidden_last", "a member before the directory that it lacks", between(_HIDDEN, at=4))
_add(CORRUPT, "hidden_followed", "the same, where checksum and sizes may follow", between(_HIDDEN, 0x808, 3))
_add(CORRUPT, "descriptor_unsaid", "checksum and sizes after a payload that says nothing of them",
     between(b"PK\7\x08" + bytes(12)))  # fmt: skip
for _size in (12, 16, 20, 24):
    _add(DONE, f"descriptor_{_size}", "checksum and sizes after a payload", between(bytes(_size), 0x808))
_add(CORRUPT, "descriptor_long", "more than checksum and sizes after a payload", between(bytes(28), 0x808))

# ---------------------------------------------------------------------------------------------- zip: local headers


def changed(**changes: object) -> bytes:
    """The sound archive with its storage changed."""
    return zipped([PICKLE, ORDER, STORED.changed(**changes), VERSION])


def field(kind: int, content: bytes) -> bytes:
    return struct.pack("<2H", kind, len(content)) + content


_WIDE = {"local_size": 0xFFFFFFFF, "local_packed": 0xFFFFFFFF}
_add(DONE, "local_wide", "sizes in a zip64 field", changed(**_WIDE, local_extra=field(1, struct.pack("<2Q", 24, 24))))
_add(DONE, "local_wide_zero", "a zip64 field of zeros", changed(**_WIDE, local_extra=field(1, bytes(16))))
_add(CORRUPT, "local_wide_other", "other sizes in a zip64 field",
     changed(**_WIDE, local_extra=field(1, struct.pack("<2Q", 12, 12))))  # fmt: skip
_add(CORRUPT, "local_wide_missing", "sizes that are in no field", changed(**_WIDE))
_add(CORRUPT, "local_wide_twice", "two zip64 fields",
     changed(**_WIDE, local_extra=field(1, struct.pack("<2Q", 24, 24)) * 2))  # fmt: skip
_add(CORRUPT, "local_follows", "sizes that follow, by what stands before the data only", changed(local_flags=0x808))
_add(CORRUPT, "entry_wide_twice", "two zip64 fields in the directory",
     changed(size=0xFFFFFFFF, packed=0xFFFFFFFF, local_size=24, local_packed=24,
             extra=field(1, struct.pack("<2Q", 24, 24)) + field(1, struct.pack("<2Q", 12, 12))))  # fmt: skip
_add(UNSUPPORTED, "patch", "a storage that is a patch", changed(flags=0x20))
_at = _sound.index(b"archive/data/0") - 16
_add(CORRUPT, "local_crc", "another checksum before the data", _sound[:_at] + b"\1\2\3\4" + _sound[_at + 4 :])

# ------------------------------------------------------------------------------------------------------- zip: names


def with_member(added: str | bytes, data: bytes = b"big", *, first: bool = False, **facts: object) -> bytes:
    """The sound archive without a byte order, and a member more."""
    more = Member(added, data, **facts)
    return zipped([more, PICKLE, STORED, VERSION] if first else [PICKLE, STORED, VERSION, more])


for _file, _why, _name in (
    ("case_byteorder", "the byte order in upper case, where torch finds it", "archive/BYTEORDER"),
    ("case_byteorder_first", "one letter of it", "archive/byteOrder"),
    ("case_directory", "the byte order in a directory of upper case", "ARCHIVE/byteorder"),
    ("case_storages", "a storage in a directory of upper case", "archive/Data/1"),
    ("case_constants", "the constants of a script in upper case", "archive/CONSTANTS.pkl"),
    ("backslash", "a byte order behind a backslash, which is a slash to zipfile on Windows", "archive\\byteorder"),
    ("slashes", "a byte order behind two slashes", "archive//byteorder"),
    ("dot", "a byte order in the directory .", "archive/./byteorder"),
    ("dots", "a byte order in the directory ..", "archive/../byteorder"),
    ("dot_first", "the directory of the archive in the directory .", "./archive/byteorder"),
    ("root", "the directory of the archive in the root", "/archive/byteorder"),
    ("nul", "a byte order with something after a NUL", "archive/byteorder\0x"),
    ("nul_storage", "a storage of the same name up to a NUL", "archive/data/0\0x"),
    ("nul_elsewhere", "a NUL in the name of something else", "x\0archive/y"),
    ("slash_storage", "a file that is named as a directory", "archive/data/1/"),
):
    _add(CORRUPT, f"name_{_file}", _why, with_member(_name))
_add(CORRUPT, "name_backslash_storage", "a storage behind a backslash", with_member("archive\\data\\0", OTHER))
_add(CORRUPT, "name_two_odd", "two names that are one without a dot",
     zipped([*M, Member("archive/./x", b"1"), Member("archive/.//x", b"2")]))  # fmt: skip
_add(CORRUPT, "name_two_cases", "code whose names differ in upper case only",
     zipped([*M, Member("archive/code/a.py", b"1"), Member("archive/code/A.py", b"2")]))  # fmt: skip
_add(CORRUPT, "name_nul_prefix", "a NUL in the name of the directory", zipped(members(P, prefix="a\0b")))
_add(CORRUPT, "name_nul_key", "a key with a NUL, where torch takes the storage before it",
     zipped(members(pickled(mapped(text("w"), tensor(storage("0\0x")))), {"0": OTHER, "0\0x": DATA})))  # fmt: skip
_add(DONE, "name_upper", "a directory and keys in upper case",
     zipped(members(pickled(mapped(text("w"), tensor(storage("Key")))), {"Key": DATA}, prefix="Model V1")))  # fmt: skip
_add(DONE, "name_other_case", "something else in upper case", with_member("archive/README.md"))
_add(DONE, "name_outside", "something beside the directory of the archive", with_member("__MACOSX/archive/._data.pkl"))
_add(DONE, "name_utf8", "a directory of letters that are not ASCII", zipped(members(P, prefix="модель")))
_add(DONE, "name_utf8_unsaid", "the same without the flag that says so",
     zipped([part.changed(name=part.name.replace("archive", "модель").encode(), flags=0) for part in M]))  # fmt: skip


def called_by_others(given: str, other: str, crc: int | None = None) -> dict[str, object]:
    """A member with another name in the extra field for names in Unicode, which newer releases of zipfile take."""
    checksum = zlib.crc32(given.encode()) if crc is None else crc
    return {"extra": field(0x7075, struct.pack("<BI", 1, checksum) + other.encode())}


_add(CORRUPT, "name_unicode", "a member that is a storage by its name in Unicode",
     with_member("archive/x", OTHER, **called_by_others("archive/x", "archive/data/0")))  # fmt: skip
_add(CORRUPT, "name_unicode_elsewhere", "the same from outside of the directory",
     with_member("x/data/0", OTHER, **called_by_others("x/data/0", "archive/data/0")))  # fmt: skip
_add(CORRUPT, "name_unicode_hidden", "a storage that is something else by its name in Unicode",
     changed(**called_by_others("archive/data/0", "archive/data/9")))  # fmt: skip
_add(DONE, "name_unicode_stale", "a name in Unicode of a name before",
     with_member("archive/x", OTHER, **called_by_others("archive/x", "archive/data/0", 7)))  # fmt: skip
_add(DONE, "name_unicode_same", "the same name in Unicode",
     changed(**called_by_others("archive/data/0", "archive/data/0")))  # fmt: skip
_add(CORRUPT, "name_code_page", "two names that are one in code page 437",
     zipped([*M, Member("archive/é".encode(), b"1", flags=0), Member("archive/├⌐", b"2", flags=0x800)]))  # fmt: skip


def pickles(*named: tuple[str, Make]) -> Make:
    """An archive of several descriptions: the first is where torch looks."""

    def make(canary: str) -> bytes:
        parts = [Member(each, of(canary)) for each, of in named]
        places = dict.fromkeys(each[: -len("data.pkl")] for each, _ in named)
        rest = [
            Member(place + part, data) for place in places for part, data in (("data/0", DATA), ("version", b"3\n"))
        ]
        return zipped([*parts, *rest])

    return make


def sound(canary: str) -> bytes:
    return P


_add(UNSAFE, "pickle_in_data", "a description in the directory data, which comes first, where torch looks for it",
     pickles(("data/data.pkl", evil), ("data.pkl", sound)))  # fmt: skip
_live("pickle_in_case", "a description in upper case above the other",
      pickles(("archive/DATA.PKL", evil), ("archive/x/data.pkl", sound)))  # fmt: skip
_live("pickle_only_in_case", "a description in upper case only", pickles(("archive/Data.pkl", evil)))
_add(CORRUPT, "pickle_in_case_sound", "a sound description in upper case", pickles(("archive/DATA.PKL", sound)))
_add(CORRUPT, "pickle_behind_a_backslash", "a description behind a backslash",
     pickles(("archive/x", sound), ("archive\\data.pkl", sound)))  # fmt: skip
_add(DONE, "pickle_as_key", "a storage whose key ends as a description does", zipped(members(
    pickled(mapped(text("w"), tensor(storage("x/data.pkl")))), {"x/data.pkl": DATA}
)))  # fmt: skip

# -------------------------------------------------------------------------------------------------------------- tar


def summed(block: bytes, signed: bool = False) -> bytes:
    """A block of 512 bytes with the checksum of a tar header in it."""
    block = block[:148] + b" " * 8 + block[156:]
    total = sum(byte - 256 * (signed and byte > 127) for byte in block)
    return block[:148] + b"%06o\0 " % total + block[156:]


def entry(
    named: str | bytes,
    data: bytes = b"",
    kind: bytes = b"0",
    *,
    size: int | None = None,
    link: bytes = b"",
    magic: bytes = b"ustar\x0000",
    mode: bytes = b"0000644\0",
    signed: bool = False,
    pad: bytes = b"",
) -> bytes:
    """A member of a tar archive; `pad` fills its last block."""
    raw = named if isinstance(named, bytes) else named.encode()
    size = len(data) if size is None else size
    numbers = b"0000000\0" * 2 + b"%011o\0" % size + b"00000000000\0"
    block = raw.ljust(100, b"\0") + mode + numbers + bytes(8) + kind + link.ljust(100, b"\0") + magic.ljust(8, b"\0")
    room = -len(data) % 512
    return summed(block.ljust(512, b"\0"), signed) + data + pad[:room].ljust(room, b"\0")


def record(key: str, value: str) -> bytes:
    """A record of an extended header."""
    body = f" {key}={value}\n".encode()
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length += 1
    return str(length).encode() + body


_KEY = number(7)
STORAGES = (
    pickled(number(1)) + pickled(several(_KEY, text("cpu"), name("torch", "FloatStorage")))
    + struct.pack("<q", 6) + DATA + pickled(listed())
)  # fmt: skip
TENSORS = (
    pickled(number(1)) + pickled(several(number(8), _KEY, name("torch", "FloatTensor")))
    + struct.pack("<i4x5q", 2, 2, 3, 3, 1, 0)
)  # fmt: skip
OBJECT = pickled(mapped(text("w"), text("8") + b"Q"))
THREE = entry("storages", STORAGES) + entry("tensors", TENSORS) + entry("pickle", OBJECT)
END = bytes(1024)


def tar(*blocks: bytes) -> bytes:
    return b"".join(blocks) + END


# ---------------------------------------------------------------------------------------------- one file of two kinds


def zip_and_tar() -> bytes:
    """A zip archive whose first 512 bytes are a header of a tar archive."""
    made = zipped([PICKLE.changed(local_extra=b"FB" + struct.pack("<H", 600) + bytes(600)), *M[1:]])
    return summed(made[:512]) + made[512:]


_add(CORRUPT, "zip_and_tar", "a zip archive that begins as a tar archive does", zip_and_tar())

# ----------------------------------------------------------------------------------------------------- other kinds

for _protocol, _data in enumerate((b"(dp0\nVw\np1\nI1\ns.", b"}q\0X\1\0\0\0wq\1K\1s.")):
    _add(UNSUPPORTED, f"protocol_{_protocol}", f"a plain pickle of protocol {_protocol}", _data)
_add(UNSUPPORTED, "protocol_0_number", "a plain pickle of a number", b"I1\n.")
_add(UNSUPPORTED, "exported", "an archive of torch.export", zipped([
    Member("m/data/weights/weight_0", DATA), Member("m/models/model.json", b"{}"), Member("m/archive_format", b"pt2"),
]))  # fmt: skip
_add(UNSUPPORTED, "package", "a package of torch.package", zipped([
    Member("m/model/model.pkl", P), Member("m/.data/extern_modules", b"torch"), Member("m/.data/0.storage", DATA),
]))  # fmt: skip
