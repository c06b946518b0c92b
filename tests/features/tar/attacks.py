"""Tar archives that two readers read differently, torch and tarfile; hostile, broken and odd ones."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

from attacks.assemble import NONE, called, listed, mapped, number, pickled, storage, text
from attacks.corpus import CORRUPT, DONE, UNSAFE, UNSUPPORTED, Case, evil
from attacks.directories import Directory
from attacks.live import SYSTEM, touch
from attacks.readers import OBJECT, STORAGES, TENSORS, THREE, Make, behind, entry, record, tar

FILES: list[Case] = []
DIRECTORIES: list[Directory] = []


def _add(exit_code: int, file: str, why: str, made: bytes | Make, live: bool = False) -> None:
    make = made if callable(made) else lambda canary: made
    FILES.append(Case(f"two_{file}.pt", "readers", exit_code, why, make, live=live, whole=True))


def _live(file: str, why: str, made: Make) -> None:
    """torch.load runs an attack in it."""
    _add(UNSAFE, file, why, made, live=True)


def and_evil(*ways: Callable[[bytes], bytes]) -> Make:
    """The three members, and after them another pickle that only some readers find."""
    return lambda canary: tar(THREE, *(way(evil(canary)) for way in ways))


def inside(kind: bytes, named: str = "x") -> Callable[[bytes], bytes]:
    """A member of a type without data, in whose data there is another."""

    def make(pickle: bytes) -> bytes:
        hidden = entry("pickle", pickle)
        return entry(named, b"", kind, size=len(hidden), link=b"y") + hidden

    return make


_add(DONE, "tar", "a valid tar archive", tar(THREE))
_add(DONE, "tar_v7", "a sound tar archive without the magic of newer ones", tar(
    entry("storages", STORAGES, b"\0", magic=b""), entry("tensors", TENSORS, b"\0", magic=b""),
    entry("pickle", OBJECT, b"\0", magic=b""),
))  # fmt: skip
_add(DONE, "tar_gnu", "a sound tar archive of GNU's format", tar(
    *(entry(part, data, magic=b"ustar  \0") for part, data in
      (("storages", STORAGES), ("tensors", TENSORS), ("pickle", OBJECT)))
))  # fmt: skip
_add(DONE, "tar_times", "a sound tar archive with exact times", tar(
    entry("././@PaxHeader", record("mtime", "1479513600.25"), b"x"), THREE
))  # fmt: skip
_live("tar_twice", "a second pickle of the same name", and_evil(lambda data: entry("pickle", data)))
_live("tar_contiguous", "a contiguous file of the same name", and_evil(lambda data: entry("pickle", data, b"7")))
_live("tar_unknown", "a file of an unknown type of the same name", and_evil(lambda data: entry("pickle", data, b"Z")))
for _kind, _what in (
    (b"5", "directory"),
    (b"1", "hard_link"),
    (b"2", "symbolic_link"),
    (b"3", "device"),
    (b"6", "fifo"),
):
    _live(f"tar_in_{_what}", f"a member in the data of a {_what}", and_evil(inside(_kind)))
_live("tar_linked", "a pickle that is a link to another member",
      lambda canary: tar(entry("x", evil(canary)), THREE, entry("pickle", b"", b"1", link=b"x")))  # fmt: skip
_live("tar_slash", "a directory of an old tar archive with a member in its data", and_evil(
    lambda data: entry("x/", b"", b"\0", size=512 + -(-len(data) // 512) * 512) + entry("pickle", data)
))  # fmt: skip
_live("tar_long_name", "a name in a header of GNU's", and_evil(
    lambda data: entry("././@LongLink", b"pickle\0", b"L") + entry("x", data)
))  # fmt: skip
_live("tar_solaris", "a name in a header of Sun's", and_evil(
    lambda data: entry("x", record("path", "pickle"), b"X") + entry("y", data)
))  # fmt: skip
_live("tar_path", "a name in an extended header", and_evil(
    lambda data: entry("x", record("path", "pickle"), b"x") + entry("y", data)
))  # fmt: skip
_live("tar_path_slash", "a name with a slash after it in an extended header", and_evil(
    lambda data: entry("x", record("path", "pickle/"), b"x") + entry("y", data)
))  # fmt: skip
_live("tar_path_for_all", "a name in an extended header for all", and_evil(
    lambda data: entry("x", record("path", "pickle"), b"g") + entry("y", data)
))  # fmt: skip
_live("tar_two_headers", "two extended headers for one member", and_evil(
    lambda data: entry("x", record("path", "pickle"), b"x") + entry("x", record("path", "y"), b"x") + entry("z", data)
))  # fmt: skip
_live("tar_padding", "a name after the end of an extended header", and_evil(
    lambda data: entry("x", record("comment", "y"), b"x", pad=record("path", "pickle")) + entry("y", data)
))  # fmt: skip
_live("tar_size", "a size in an extended header, and another in the header", and_evil(
    lambda data: entry("x", record("size", "0"), b"x") + entry("y", b"", size=512 + -(-len(data) // 512) * 512)
    + entry("pickle", data)
))  # fmt: skip
_live("tar_sparse_name", "a name in the header of a sparse file", and_evil(
    lambda data: entry("x", record("GNU.sparse.name", "pickle"), b"x") + entry("y", data)
))  # fmt: skip
_add(CORRUPT, "tar_sparse", "a sparse file", tar(THREE, entry("x", b"1", b"S", magic=b"ustar  \0")))
_add(CORRUPT, "tar_more", "a member that torch does not write", tar(THREE, entry("readme.txt", b"hello")))
_add(CORRUPT, "tar_directory", "an empty directory", tar(entry("x", b"", b"5"), THREE))
_add(CORRUPT, "tar_mode", "a mode that is no number, which ends the archive for tarfile", tar(
    THREE, entry("x", b"1", mode=b"zzzzzzz\0")
))  # fmt: skip
_add(CORRUPT, "tar_link_loop", "a link to itself", tar(THREE, entry("pickle", b"", b"1", link=b"pickle")))
_add(CORRUPT, "tar_out", "a link that leads out", tar(
    entry("tensors", TENSORS), entry("pickle", OBJECT), entry("storages", b"", b"2", link=b"/etc/passwd")
))  # fmt: skip
_add(UNSUPPORTED, "tar_of_much", "an archive of directories, links and long names", tar(
    entry("model", b"", b"5"), entry("././@LongLink", b"a" * 150 + b"\0", b"L"), entry("a" * 99, b"1"),
    entry("latest", b"", b"2", link=b"model"),
))  # fmt: skip
_live("tar_v7_live", "an attack in a tar archive without magic", lambda canary: tar(
    entry("storages", STORAGES, magic=b""), entry("tensors", TENSORS, magic=b""),
    entry("pickle", evil(canary), magic=b""),
))  # fmt: skip

# ---------------------------------------------------------------------------------------------- one file of two kinds


def tar_of_evil(canary: str, first: bytes = b"") -> bytes:
    return tar(first, entry("storages", STORAGES), entry("tensors", TENSORS), entry("pickle", evil(canary)))


MAGIC = pickled(number(0x1950A86A20F9469CFC6C))
_live("tar_before_zip", "a tar archive before a zip archive", behind(tar_of_evil))
_live("tar_v7_before_zip", "the same without the magic of tar archives", behind(
    lambda canary: tar(*(entry(part, data, magic=b"") for part, data in
                         (("storages", STORAGES), ("tensors", TENSORS), ("pickle", evil(canary)))))
))  # fmt: skip
_add(CORRUPT, "sound_tar_before_zip", "a sound tar archive before a zip archive", behind(lambda canary: tar(THREE)))
_live("tar_and_stream", "a tar archive whose first name is the magic number of a stream",
      lambda canary: tar_of_evil(canary, entry(MAGIC, record("mtime", "1"), b"x")))  # fmt: skip
_add(CORRUPT, "tar_and_pickle", "a tar archive whose first name is a pickle",
     tar(entry(pickled(NONE), record("mtime", "1"), b"x"), THREE))  # fmt: skip
_add(UNSAFE, "tar_and_attack", "a tar archive whose first name is an attack",
     tar(entry(b"\x80\2cos\nsystem\nX\2\0\0\0id\x85R.", record("mtime", "1"), b"x"), THREE))  # fmt: skip
_text = b"\x80\2X" + struct.pack("<I", 512 + record("mtime", "1.5").index(b".") - 7)
_add(CORRUPT, "tar_and_long_pickle", "a tar archive in a text of a pickle that ends with a point of its second block",
     tar(entry(_text, record("mtime", "1.5"), b"x"), THREE))  # fmt: skip
_live("tar_signed", "a stream that is a tar archive by a checksum of signed bytes", lambda canary: tar_of_evil(
    canary, entry(MAGIC, record("mtime", "1"), b"x", signed=True)
))  # fmt: skip

# ------------------------------------------------------------------------------------------------------- directories


def _tar(exit_code: int, file: str, why: str, parts: Callable[[str], dict[str, bytes]], live: bool = False) -> None:
    def make(place: Path, canary: str) -> Path:
        path = place / "model.pt"
        with tarfile.open(path, "w") as opened:
            for member, data in parts(canary).items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                opened.addfile(info, io.BytesIO(data))
        return path

    DIRECTORIES.append(Directory(f"tar_{file}", "tar", exit_code, why, make, "model.pt" if live else ""))


_EMPTY = {"storages": pickled(number(0)) + pickled(listed()), "tensors": pickled(number(0))}
_tar(UNSUPPORTED, "of_files", "an archive of something else", lambda canary: {"readme.txt": b"hello"})
_tar(UNSUPPORTED, "out_of_the_directory", "members that lead out", lambda canary: {"../../evil": b"x", "/etc/x": b"x"})
_tar(CORRUPT, "empty_members", "members without content", lambda canary: dict.fromkeys((*_EMPTY, "pickle"), b""))
_tar(DONE, "nothing", "no tensors at all", lambda canary: {**_EMPTY, "pickle": pickled(mapped())})
_tar(
    CORRUPT, "count", "2^62 storages", lambda canary: {**_EMPTY, "storages": pickled(number(1 << 62)), "pickle": b"N."}
)  # fmt: skip
_tar(
    CORRUPT, "unknown_tensor", "a tensor that is not there",
    lambda canary: {**_EMPTY, "pickle": pickled(mapped(text("a"), storage()))},
)  # fmt: skip
for _part in ("storages", "tensors", "pickle"):
    _tar(
        UNSAFE, f"live_{_part}", f"os.system in the member {_part}",
        lambda canary, part=_part: {
            **_EMPTY, "pickle": pickled(mapped()), part: pickled(called(SYSTEM, touch(canary)))
        },
        live=True,
    )  # fmt: skip
