"""The corpus of hostile, broken and odd files: what each is, and how a conversion of it has to end.

    python -m attacks.corpus DIRECTORY     (in tests/) makes all of them, with a manifest
    python -m attacks.corpus --manifest    writes manifest.json, which is kept in the repository

Files are made when they are needed and not kept: anti-virus software is right about them. Live ones make a file
`canary` where they are told to when they are loaded with torch.load(weights_only=False).
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptconv.cli.registered import COMMANDS

from .assemble import (
    DATA,
    FALSE,
    HOOKS,
    NONE,
    TRUE,
    Member,
    archive,
    called,
    checkpoint,
    listed,
    mapped,
    members,
    name,
    number,
    numbers,
    pickled,
    raw,
    several,
    storage,
    tensor,
    text,
    wide,
    zipped,
)
from .live import ODD, PAYLOADS, SYSTEM, code, touch

MANIFEST = Path(__file__).parent / "manifest.json"
DONE, UNSAFE, CORRUPT, UNSUPPORTED = 0, 3, 4, 5


@dataclass(frozen=True)
class Case:
    """`make` gives the file's bytes, knowing where the canary is to be made. `exit` is what the conversion returns.

    `live`: torch.load makes the canary. `whole`: if it is converted, the output is the tensor "w" of assemble.VALUES.
    """

    file: str
    family: str
    exit: int
    why: str
    make: Callable[[str], bytes]
    live: bool = False
    whole: bool = False

    @property
    def command(self) -> str:
        return BACK if self.file.endswith(".safetensors") else "pt2safetensors"


# The command that converts safetensors: what is kept in them as data could run in a `.pt` file.
BACK = "safetensors2pt" if "safetensors2pt" in COMMANDS else "convert"
CASES: dict[str, Case] = {}


def add(family: str, exit_code: int, file: str, why: str, made: bytes | Callable[[str], bytes], **facts: bool) -> None:
    assert file not in CASES, file
    CASES[file] = Case(file, family, exit_code, why, made if callable(made) else lambda canary: made, **facts)


# ------------------------------------------------------------------------------------------------------------- live

for _name, (_why, _make) in PAYLOADS.items():
    add(
        "live",
        DONE if _name in ODD else UNSAFE,
        f"live_{_name}.pt",
        _why,
        lambda canary, make=_make: archive(make(canary)),
        live=True,
        whole=True,
    )
for _protocol in range(6):
    add(
        "live",
        UNSAFE,
        f"live_protocol_{_protocol}.pt",
        f"os.system under protocol {_protocol}",
        lambda canary, protocol=_protocol: zipped(members(pickled(called(SYSTEM, touch(canary)), protocol))),
        live=True,
    )
add(
    "live",
    UNSAFE,
    "live_python_2_eval.pt",
    "eval by the name that Python 2 has for it",
    lambda canary: zipped(members(pickled(called(name("__builtin__", "eval"), code(canary))))),
    live=True,
)
add(
    "live",
    UNSAFE,
    "live_key.pt",
    "os.system as the key of a dict",
    lambda canary: zipped(members(checkpoint(NONE, key=called(SYSTEM, touch(canary))))),
    live=True,
)
add(
    "live",
    DONE,
    "live_nested_archive.pt",
    "an attack inside an archive inside a checkpoint: bytes like any others",
    lambda canary: archive(raw(archive(called(SYSTEM, touch(canary))))),
    whole=True,
)
add(
    "live",
    DONE,
    "only_a_name.pt",
    "os.system is mentioned and nothing is called: a name does nothing",
    archive(SYSTEM),
    whole=True,
)

# -------------------------------------------------------------------------------------------------------------- zip

SOUND = mapped(text("w"), tensor())
P = pickled(SOUND)
M = members(P)
PICKLE, ORDER, STORED, VERSION = M


def zip_case(exit_code: int, file: str, why: str, made: bytes) -> None:
    add("zip", exit_code, f"zip_{file}.pt", why, made, whole=True)


def swapped(**changes: object) -> list[Member]:
    """The sound archive with its storage changed."""
    return [PICKLE, ORDER, STORED.changed(**changes), VERSION]


OTHER = struct.pack("<6f", 9, 9, 9, 9, 9, 9)
whole = zipped(M)
directory = whole.index(b"PK\x01\x02")
zip_case(DONE, "sound", "a sound archive", whole)
zip_case(DONE, "wide", "a sound archive with zip64 records", wide(M))
zip_case(CORRUPT, "comment", "a comment that contains an end record", zipped(M, comment=b"PK\x05\x06" + bytes(30)))
zip_case(DONE, "path_prefix", "a prefix that is a path", zipped(members(P, prefix="../../tmp/evil")))
zip_case(DONE, "absolute_prefix", "a prefix that is an absolute path", zipped(members(P, prefix="/etc/cron.d")))
zip_case(DONE, "drive_prefix", "a prefix that is a path of Windows", zipped(members(P, prefix="C:\\Windows")))
zip_case(CORRUPT, "nul_prefix", "a prefix with a NUL", zipped(members(P, prefix="a\0b")))
zip_case(
    DONE,
    "path_key",
    "a storage whose key is a path",
    zipped(members(pickled(mapped(text("w"), tensor(storage("../../../tmp/evil")))), {"../../../tmp/evil": DATA})),
)
zip_case(
    DONE, "symlink", "a member that says it is a symbolic link",
    zipped([*M, Member("archive/link", b"/etc/passwd", flags=0)]),
)  # fmt: skip
zip_case(DONE, "unknown_member", "a member that nothing refers to", zipped([*M, Member("archive/x", b"x" * 99)]))
zip_case(DONE, "no_version", "without version and byteorder", zipped([PICKLE, STORED]))
zip_case(DONE, "deflated_pickle", "a deflated pickle", zipped([PICKLE.changed(method=8), *M[1:]]))
zip_case(DONE, "no_crc", "without checksums", zipped([part.changed(crc=0) for part in M]))
zip_case(CORRUPT, "two_pickles", "two members data.pkl in one place", zipped([PICKLE, *M]))
zip_case(
    CORRUPT, "two_storages", "two members of the same name with other data",
    zipped([*M, STORED.changed(data=OTHER)]),
)  # fmt: skip
zip_case(
    CORRUPT, "two_cases", "two members whose names differ in upper case only",
    zipped([PICKLE, Member("archive/DATA/0", OTHER), *M[1:]]),
)  # fmt: skip
zip_case(CORRUPT, "storage_directory", "a storage that says it is a directory", zipped(swapped(attributes=0x10)))
zip_case(DONE, "empty_directory", "a directory", zipped([Member("archive/data/", attributes=0x10), *M]))
zip_case(CORRUPT, "two_trees", "two checkpoints in one archive", zipped([*M, *members(P, prefix="other")]))
zip_case(CORRUPT, "alias", "two members with the same place", zipped([*M, Member("archive/data/1", DATA, header=0)]))
zip_case(CORRUPT, "overlap", "a member that reaches into the next", zipped(swapped(size=200, packed=200)))
zip_case(CORRUPT, "beyond", "a member beyond the end", zipped(swapped(header=1 << 30)))
zip_case(CORRUPT, "in_the_directory", "a member inside the directory", zipped(swapped(header=directory)))
zip_case(CORRUPT, "in_the_middle", "a member inside another", zipped(swapped(header=40)))
zip_case(CORRUPT, "local_name", "another name before the data", zipped(swapped(local_name=b"archive/data/9")))
zip_case(CORRUPT, "local_size", "another size before the data", zipped(swapped(local_size=12)))
zip_case(CORRUPT, "local_packed", "another packed size before the data", zipped(swapped(local_packed=12)))
zip_case(CORRUPT, "local_method", "another method before the data", zipped(swapped(local_method=8)))
zip_case(CORRUPT, "local_flags", "encrypted by what stands before the data", zipped(swapped(local_flags=1)))
zip_case(CORRUPT, "local_signature", "no header before the data", zipped(swapped(signature=b"XXXX")))
zip_case(
    CORRUPT,
    "pickle_local_name",
    "another name before the pickle",
    zipped([PICKLE.changed(local_name=b"a/b.pkl"), *M[1:]]),
)
zip_case(UNSUPPORTED, "encrypted", "an encrypted storage", zipped(swapped(flags=1, local_flags=1)))
zip_case(UNSUPPORTED, "masked", "an encrypted directory", zipped(swapped(flags=0x2000)))
for method, what in ((1, "shrink"), (9, "deflate64"), (12, "bzip2"), (14, "lzma"), (93, "zstandard"), (99, "AES")):
    zip_case(UNSUPPORTED, f"method_{method}", f"a storage of method {method} ({what})", zipped(swapped(method=method)))
zip_case(UNSUPPORTED, "pickle_bzip2", "a pickle of another method", zipped([PICKLE.changed(method=12), *M[1:]]))
zip_case(CORRUPT, "pickle_crc", "a pickle with another checksum", zipped([PICKLE.changed(crc=1), *M[1:]]))
zip_case(CORRUPT, "short", "a storage with too little data", zipped(swapped(data=DATA[:20])))
zip_case(CORRUPT, "long", "a storage with too much data", zipped(swapped(data=DATA + b"1234")))
zip_case(CORRUPT, "empty_storage", "a storage without data", zipped(swapped(data=b"")))
zip_case(CORRUPT, "missing_storage", "a storage that is not there", zipped([PICKLE, ORDER, VERSION]))
zip_case(
    CORRUPT,
    "bomb",
    "a pickle that inflates to 64 MiB of zeros",
    zipped([Member("archive/data.pkl", bytes(64 << 20), method=8)]),
)
zip_case(
    CORRUPT,
    "bomb_by_size",
    "a pickle that says it inflates to 1 GiB",
    zipped([PICKLE.changed(method=8, size=1 << 30), *M[1:]]),
)
zip_case(
    CORRUPT,
    "inflates_to_more",
    "a pickle that inflates to more than it says",
    zipped([PICKLE.changed(method=8, size=10), *M[1:]]),
)
zip_case(
    CORRUPT, "byteorder", "a byte order that there is not", zipped([PICKLE, ORDER.changed(data=b"middle"), *M[2:]])
)
zip_case(CORRUPT, "prepended", "something before the archive", b"#!/bin/sh\nexit 0\n" + whole)
zip_case(CORRUPT, "appended", "something after the archive", whole + b"trailing")
zip_case(CORRUPT, "appended_much", "much after the archive", whole + bytes(70_000))
zip_case(CORRUPT, "two_archives", "an archive after the archive", whole + zipped(members(P, {"0": OTHER})))
for cut in (10, 30, directory - 5, directory + 10, len(whole) - 30, len(whole) - 1):
    zip_case(CORRUPT, f"cut_at_{cut}", f"cut at byte {cut} of {len(whole)}", whole[:cut])
zip_case(CORRUPT, "count_less", "fewer members than there are", zipped(M, count=3))
zip_case(CORRUPT, "count_more", "more members than there are", zipped(M, count=5))
zip_case(CORRUPT, "directory_elsewhere", "a directory at another place", zipped(M, start=directory - 3))
zip_case(CORRUPT, "directory_beyond", "a directory beyond the end", zipped(M, start=1 << 31))
zip_case(CORRUPT, "directory_huge", "a directory larger than the file", zipped(M, size=1 << 31))
zip_case(UNSUPPORTED, "disks", "a part of an archive on several disks", zipped(M, disk=1))
zip_case(CORRUPT, "wide_elsewhere", "zip64 records at another place", wide(M, where=0))
zip_case(CORRUPT, "wide_beyond", "zip64 records beyond the end", wide(M, where=1 << 62))
zip_case(CORRUPT, "wide_count", "2^62 members", wide(M, count=1 << 62))
zip_case(CORRUPT, "wide_size", "a directory of 2^63 bytes", wide(M, size=1 << 63))
zip_case(CORRUPT, "wide_start", "a directory at byte 2^64 - 1", wide(M, start=(1 << 64) - 1))
zip_case(CORRUPT, "wide_missing", "a size that stands nowhere", zipped(swapped(size=0xFFFFFFFF, packed=0xFFFFFFFF)))
zip_case(
    CORRUPT, "wide_field", "a size of 2^63 in a zip64 field",
    zipped(swapped(size=0xFFFFFFFF, packed=0xFFFFFFFF, extra=struct.pack("<2H2Q", 1, 16, 1 << 63, 1 << 63))),
)  # fmt: skip
zip_case(
    CORRUPT,
    "wide_field_short",
    "a zip64 field that is too short",
    zipped(swapped(size=0xFFFFFFFF, packed=0xFFFFFFFF, extra=struct.pack("<2HI", 1, 4, 1))),
)
zip_case(
    CORRUPT,
    "wide_field_lies",
    "a zip64 field longer than there is room",
    zipped(swapped(size=0xFFFFFFFF, packed=0xFFFFFFFF, extra=struct.pack("<2H", 1, 60000))),
)
zip_case(CORRUPT, "not_utf8", "a name that is not UTF-8", zipped([*M, Member(b"archive/\xff\xfe", b"", flags=0x800)]))
zip_case(UNSUPPORTED, "no_pickle", "an archive of something else", zipped([Member("readme.txt", b"hello")]))
zip_case(UNSUPPORTED, "nothing", "an empty archive", zipped([]))
zip_case(UNSUPPORTED, "script", "a TorchScript archive", zipped([*M, Member("archive/constants.pkl", b"\x80\x02).")]))
zip_case(
    DONE,
    "many_members",
    "20,000 members that nothing refers to",
    zipped([*M, *(Member(f"archive/z/{i}") for i in range(20_000))]),
)

# ----------------------------------------------------------------------------------------------------------- pickle


def pickle_case(exit_code: int, file: str, why: str, value: bytes, *, bare: bool = False) -> None:
    """`value` stands beside a sound tensor, or is the whole pickle."""
    add("pickle", exit_code, f"pickle_{file}.pt", why, zipped(members(value)) if bare else archive(value), whole=True)


def doubled(start: bytes, step: bytes, levels: int) -> bytes:
    """A container of twice the same container of twice the same …"""
    out = start
    for level in range(levels):
        out += b"q" + bytes([level]) + b"0" + step.replace(b"$", b"h" + bytes([level]))
    return out


def colliding(count: int) -> bytes:
    """Integers that all have the same hash."""
    return mapped(*(number(index * ((1 << 61) - 1)) + NONE for index in range(1, count)))


pickle_case(
    DONE,
    "objects",
    "objects of unknown classes",
    called(name("my.package", "Thing"), number(1)) + mapped(text("a"), number(2)) + b"b",
)
pickle_case(
    DONE,
    "enum",
    "getattr, as enums of some Pythons have it",
    called(name("builtins", "getattr"), name("my.package", "Colour"), text("RED")),
)
pickle_case(
    DONE,
    "bound_method",
    "a bound method",
    called(name("builtins", "getattr"), called(name("my.package", "Thing")), text("forward")),
)
pickle_case(
    DONE, "class_in_a_class", "a class inside a class", called(text("my.package") + text("Outer.Inner") + b"\x93")
)
pickle_case(DONE, "module_called_code", "a package of the user's called code", called(name("code.models", "Net")))
pickle_case(DONE, "shared", "the same list twice", b"]q\x05(" + number(1) + b"e0h\x05h\x05\x86")
pickle_case(DONE, "memo_far", "a memo entry of number 2^31", NONE + b"r" + struct.pack("<I", 1 << 31))
pickle_case(DONE, "memo_last", "a memo entry of number 2^32 - 1", NONE + b"r\xff\xff\xff\xff" + b"0j\xff\xff\xff\xff")
pickle_case(DONE, "big_integer", "an integer of 250 bytes", number(1 << 1990))
pickle_case(CORRUPT, "text_length", "text of 2^63 bytes", b"\x8d" + struct.pack("<Q", 1 << 63))
pickle_case(CORRUPT, "bytes_length", "2^64 - 1 bytes", b"\x8e" + b"\xff" * 8)
pickle_case(CORRUPT, "bytearray_length", "a bytearray of 2^62 bytes", b"\x96" + struct.pack("<Q", 1 << 62))
pickle_case(CORRUPT, "text_length_32", "text of 4 GiB", b"X\xff\xff\xff\xff")
pickle_case(CORRUPT, "negative_length", "a string of -1 bytes", b"T\xff\xff\xff\xff")
pickle_case(CORRUPT, "long_length", "an integer of 2 GiB", b"\x8b" + struct.pack("<i", (1 << 31) - 1))
pickle_case(CORRUPT, "long_negative", "an integer of -1 bytes", b"\x8b\xff\xff\xff\xff")
pickle_case(CORRUPT, "long_digits", "an integer of 100,000 digits", b"L" + b"9" * 100_000 + b"L\n")
pickle_case(
    CORRUPT, "long_bytes", "an integer of 100,000 bytes", b"\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000
)
pickle_case(CORRUPT, "frame", "a frame longer than the pickle", b"\x95" + struct.pack("<Q", 1 << 62) + NONE)
pickle_case(UNSUPPORTED, "protocol_6", "protocol 6", b"\x80\x06N")
pickle_case(CORRUPT, "empty", "no pickle at all", b"", bare=True)
pickle_case(CORRUPT, "no_value", "a pickle without a value", b"\x80\x02.", bare=True)
pickle_case(CORRUPT, "no_end", "a pickle without an end", b"\x80\x02}", bare=True)
pickle_case(CORRUPT, "not_a_pickle", "text", b"hello world", bare=True)
pickle_case(CORRUPT, "unknown_opcode", "an unknown opcode", b"\xf0")
pickle_case(CORRUPT, "no_mark", "a tuple without a mark", b"tttttt")
pickle_case(CORRUPT, "empty_stack", "too many pops", b"0000000000")
pickle_case(CORRUPT, "odd_items", "a key without a value", b"}(Nu")
pickle_case(CORRUPT, "append_to_a_dict", "an element appended to a dict", b"}Na")
pickle_case(CORRUPT, "build_a_dict", "a state for a dict", b"}}b")
pickle_case(CORRUPT, "build_a_method", "a state that replaces a method", HOOKS + mapped(text("items"), NONE) + b"b")
pickle_case(CORRUPT, "build_a_class", "a state that replaces a class", HOOKS + mapped(text("__class__"), NONE) + b"b")
pickle_case(CORRUPT, "call_a_number", "a number that is called", number(1) + b")R")
pickle_case(CORRUPT, "call_with_a_list", "a call with a list", name("a", "b") + b"]R")
pickle_case(CORRUPT, "unhashable_key", "a list as a key", b"}]Ns")
pickle_case(CORRUPT, "not_utf8", "text that is not UTF-8", b"X\x02\0\0\0\xff\xfe")
pickle_case(CORRUPT, "string_without_quotes", "a string without quotes", b"Shello\n")
pickle_case(CORRUPT, "number_of_letters", "letters for a number", b"Iabc\n")
pickle_case(CORRUPT, "missing_entry", "a memo entry that was not stored", b"h\xee")
pickle_case(UNSUPPORTED, "buffer", "a buffer that is not there", b"\x97")
pickle_case(UNSUPPORTED, "extension", "a number in the extension registry", b"\x82\x01")
pickle_case(CORRUPT, "persistent_text", "a persistent id of text", b"Pabc\n")
pickle_case(CORRUPT, "persistent_none", "a persistent id of nothing", NONE + b"Q")
pickle_case(CORRUPT, "persistent_short", "a persistent id that is too short", several(text("storage")) + b"Q")
pickle_case(CORRUPT, "deep_lists", "30,000 lists inside one another", b"]" * 30_000 + b"a" * 29_999)
pickle_case(CORRUPT, "deep_tuples", "100,000 tuples inside one another", b")" + b"\x85" * 100_000)
pickle_case(CORRUPT, "deep_dicts", "30,000 dicts inside one another", b"}K\0" * 30_000 + b"}" + b"s" * 30_000)
pickle_case(CORRUPT, "deep_marks", "250,000 marks", b"(" * 250_000)
pickle_case(CORRUPT, "deep_calls", "a call of a call of a call", name("a", "b") + b")R" * 1000)
pickle_case(CORRUPT, "deep_key", "a key nested 5,000 levels deep", b"})" + b"\x85" * 5000 + b"Ns")
pickle_case(DONE, "itself_list", "a list that contains itself", b"]q\x05h\x05a")
pickle_case(DONE, "itself_dict", "a dict that contains itself", b"}q\x05K\x01h\x05s")
pickle_case(DONE, "itself_both", "a list in a dict in the list", b"]q\x05}K\x01h\x05sa")
pickle_case(
    DONE, "itself_object", "an object that knows itself", name("a", "B") + b")R" + b"q\x05}X\x02\0\0\0meh\x05sb"
)
pickle_case(CORRUPT, "laughs_lists", "2^40 lists by reference", doubled(b"]", b"]($$e", 40))
pickle_case(CORRUPT, "laughs_dicts", "2^40 dicts by reference", doubled(b"}", b"}(K\1$K\2$u", 40))
pickle_case(CORRUPT, "laughs_tuples", "2^40 tuples by reference", doubled(b")", b"$$\x86", 40))
pickle_case(CORRUPT, "hash_bomb", "a key of 2^60 shared tuples", b"}" + doubled(b")", b"$$\x86", 60) + b"Ns")
pickle_case(
    CORRUPT,
    "hash_bomb_frozen",
    "a set of 2^60 shared frozensets",
    b"\x8f(" + doubled(b"(\x91", b"($N$\x86\x91", 60) + b"\x90",
)
pickle_case(CORRUPT, "colliding_keys", "5,000 keys with one hash", colliding(5000))
pickle_case(CORRUPT, "million_dicts", "1.4 million empty dicts", b"](" + b"}" * 1_400_000 + b"e")
pickle_case(CORRUPT, "million_sets", "1.4 million empty sets", b"](" + b"\x8f" * 1_400_000 + b"e")
pickle_case(DONE, "many_nones", "60,000 times nothing", b"](" + b"N" * 60_000 + b"e")
pickle_case(
    CORRUPT,
    "bytes_of_a_number",
    "bytes(2^40), which would be a terabyte",
    called(name("builtins", "bytes"), number(1 << 40)),
)
pickle_case(DONE, "range", "range(2^62)", called(name("builtins", "range"), number(1 << 62)))
pickle_case(
    CORRUPT,
    "list_of_a_range",
    "list(range(2^40))",
    called(name("builtins", "list"), called(name("builtins", "range"), number(1 << 40))),
)
pickle_case(
    DONE, "deque", "a deque of at most 2^40", called(name("collections", "deque"), listed(number(1)), number(1 << 40))
)
pickle_case(
    CORRUPT,
    "numpy_huge",
    "an array of 2^60 elements and no data",
    called(name("numpy.core.multiarray", "_reconstruct"), name("numpy", "ndarray"), numbers(0), raw(b"b"))
    + several(number(1), numbers(1 << 60), called(name("numpy", "dtype"), text("f8")), FALSE, NONE)
    + b"b",
)

# What Python's unpicklers, and torch's own, read in more than one way.
COUNTER = called(name("collections", "Counter"), several(several(text("a"), number(3))))
pickle_case(CORRUPT, "counter_of_pairs", "a Counter of pairs, which it counts", COUNTER)
pickle_case(CORRUPT, "int_plus_one", "+1, which is True to one unpickler and 1 to the other", b"I+1\n")
pickle_case(CORRUPT, "int_octal", "010, which is 8 to one unpickler", b"I010\n")
pickle_case(CORRUPT, "int_nul", "a number with a NUL in it", b"I1\0junk\n")
pickle_case(CORRUPT, "float_underscore", "1_0, which is a number to one unpickler", b"F1_0\n")
pickle_case(CORRUPT, "float_infinite", "1e400, which is infinity to one unpickler", b"F1e400\n")
pickle_case(CORRUPT, "name_divided", "a function's module in its name", name("torch", "_utils._rebuild_tensor_v2"))
pickle_case(
    CORRUPT, "new_list", "a list that is made without its arguments", name("builtins", "list") + b"](Ne\x85\x81"
)
pickle_case(CORRUPT, "frame_in_a_frame", "a frame in a frame", b"\x95\x0c" + b"\0" * 7 + b"\x95\1" + b"\0" * 7 + b"N0N")
pickle_case(CORRUPT, "frame_too_short", "a frame that ends inside of a number", b"\x95\3" + b"\0" * 7 + b"J\1\0\0\0")
pickle_case(
    CORRUPT,
    "keys_numpy_and_int",
    "an integer of numpy and the same of Python, which are one key",
    mapped(
        called(
            name("numpy.core.multiarray", "scalar"),
            called(name("numpy", "dtype"), text("i8"), FALSE, TRUE)
            + several(number(3), text("<"), NONE, NONE, NONE, number(-1), number(-1), number(0))
            + b"b",
            raw(number(1)[2:3] + bytes(7)),
        )
        + NONE,
        number(1) + NONE,
    ),
)
pickle_case(
    DONE,
    "keys_dtype_and_tuple",
    "a dtype and a class as keys, and tuples of their names",
    mapped(
        name("torch", "float32") + NONE,
        several(text("dtype"), text("float32")) + NONE,
        name("a", "b") + NONE,
        several(text("a"), text("b")) + NONE,
    ),
)
pickle_case(DONE, "memoize_counts", "PUT far away, then up to it, then MEMOIZE", b"Nq\2" + b"q\0q\1\x94" + b"0h\3")

# What scanners of files are tested with, where it is not above.


def with_members(payload: Callable[[str], bytes], **changes: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """An archive with members added: name, with / for __ and . for _."""

    def make(canary: str) -> bytes:
        parts = members(payload(canary))
        more = [
            Member(f"archive/{key.replace('__', '/').replace('_', '.')}", of(canary)) for key, of in changes.items()
        ]
        return zipped([*parts[:-1], *more, parts[-1]])

    return make


def evil(canary: str) -> bytes:
    return pickled(called(SYSTEM, touch(canary)))


# What we refuse and one of Python's unpicklers reads: an attack may follow.
for _file, _why, _before in (
    ("number", "a number in an odd spelling", b"I+1\n0"),
    ("float", "a float in an odd spelling", b"F1\0\n0"),
    ("put", "an odd number of a memo entry", b"Np 1\n0"),
    ("counter", "a Counter of pairs", COUNTER + b"0"),
    ("bytes", "bytes of a number", called(name("builtins", "bytes"), number(3)) + b"0"),
    ("new", "a list made without its arguments", name("builtins", "list") + b"](Ne\x85\x810"),
    ("item", "an item of a list that is set", b"](Ne" + number(0) + NONE + b"s0"),
    ("attribute", "a method of an OrderedDict that is replaced", HOOKS + mapped(text("items"), NONE) + b"b0"),
    ("nested_frame", "a frame in a frame", b"\x95\x0b" + b"\0" * 7 + b"\x95\1" + b"\0" * 7 + b"NN00"),
    ("cut_frame", "an argument beyond its frame", b"\x95\2" + b"\0" * 7 + b"X\1" + b"\0" * 4 + b"0"),
):
    add(
        "odd before an attack",
        UNSAFE,
        f"odd_{_file}.pt",
        f"{_why}, and then an attack",
        lambda canary, before=_before: zipped(members(pickled(before + called(SYSTEM, touch(canary))))),
        live=True,
    )


def scanned(exit_code: int, file: str, why: str, made: Callable[[str], bytes], **facts: bool) -> None:
    add("scanners", exit_code, f"scan_{file}.pt", why, made, **facts)


def sound_pickle(canary: str) -> bytes:
    return P


scanned(DONE, "evil_member", "another pickle in the archive, which nothing reads",
        with_members(sound_pickle, evil_pkl=evil, data__evil_pkl=evil, extra__data_pickle=evil),
        whole=True)  # fmt: skip
scanned(CORRUPT, "evil_tree", "two pickles of which readers take either",
        with_members(sound_pickle, other__data_pkl=evil))  # fmt: skip
scanned(DONE, "code_member", "sources in the archive, which nothing runs",
        with_members(sound_pickle, setup_py=lambda canary: b"import os"), whole=True)  # fmt: skip
scanned(UNSUPPORTED, "script", "sources where TorchScript has them, and a state dict",
        with_members(sound_pickle, code__evil_py=lambda canary: b"import os"))  # fmt: skip
scanned(UNSAFE, "deflated", "a deflated pickle that calls os.system",
        lambda canary: zipped([PICKLE.changed(data=evil(canary), method=8), *M[1:]]), live=True)  # fmt: skip
scanned(DONE, "after_the_end", "a pickle after the end of the pickle",
        lambda canary: zipped(members(P + evil(canary))), whole=True)  # fmt: skip
scanned(UNSAFE, "before", "a pickle before the pickle",
        lambda canary: zipped(members(evil(canary) + P)), live=True)  # fmt: skip
scanned(UNSAFE, "plain_after", "a pickle without an archive, with bytes after it, as joblib has them",
        lambda canary: evil(canary) + bytes(1000) + evil(canary), live=True)  # fmt: skip
scanned(UNSUPPORTED, "plain_second", "a plain pickle that does nothing, and one that does",
        lambda canary: pickled(mapped(text("a"), NONE)) + evil(canary))  # fmt: skip
scanned(UNSUPPORTED, "keras", "an archive of Keras with a Lambda layer", lambda canary: zipped(
    [Member("config.json", b'{"class_name":"Lambda"}'), Member("model.weights.h5", b"\x89HDF\r\n\x1a\n")]
))  # fmt: skip
scanned(DONE, "long_memo", "a memo of 100,000 entries for nothing", lambda canary: archive(
    b"N" + b"".join(b"r" + struct.pack("<I", index * 3) for index in range(100_000))
), whole=True)  # fmt: skip
scanned(
    CORRUPT, "pop_everything", "a mark popped from under a sound tree", lambda canary: zipped(members(b"\x80\2(0000."))
)
scanned(
    DONE,
    "empty_frames",
    "a hundred empty frames",
    lambda canary: archive((b"\x95" + bytes(8)) * 100 + NONE),
    whole=True,
)

# ----------------------------------------------------------------------------------------------------------- tensor


def tensor_case(exit_code: int, file: str, why: str, value: bytes, storages: dict[str, bytes] | None = None) -> None:
    add("tensor", exit_code, f"tensor_{file}.pt", why, zipped(members(checkpoint(value), storages)), whole=True)


def of_type(cls: bytes, state: bytes) -> bytes:
    """A tensor of a class, with a state."""
    arguments = several(storage(), number(0), numbers(2, 3), numbers(3, 1), FALSE, HOOKS)
    function = name("torch._utils", "_rebuild_tensor_v2")
    return called(name("torch._tensor", "_rebuild_from_type_v2"), function, cls, arguments, state)


HUGE = 1 << 62
tensor_case(DONE, "view", "a view of two elements", tensor(None, 4, (2,), (1,)))
tensor_case(DONE, "last", "a view of the last element", tensor(None, 5, (1,), (1,)))
tensor_case(DONE, "empty_far", "no elements, beyond the end", tensor(None, 1 << 40, (0,), (1,)))
tensor_case(DONE, "scalar", "no dimensions", tensor(None, 0, (), ()))
tensor_case(DONE, "transposed", "transposed", tensor(None, 0, (3, 2), (1, 3)))
tensor_case(DONE, "expanded", "stride 0, small", tensor(None, 0, (5, 6), (0, 1)))
tensor_case(DONE, "overlapping", "windows that overlap", tensor(None, 0, (4, 3), (1, 1)))
tensor_case(DONE, "dims_64", "64 dimensions", tensor(None, 0, (1,) * 64, (1,) * 64))
tensor_case(DONE, "place", "on a device that there is not", tensor(storage(location="cuda:99")))
tensor_case(
    UNSUPPORTED,
    "meta",
    "2^62 elements without data",
    tensor(storage("9", 4, location="meta"), 0, (1 << 31, 1 << 31), (1, 1)),
)
tensor_case(CORRUPT, "beyond", "one element beyond the end", tensor(None, 1))
tensor_case(CORRUPT, "far_beyond", "an offset of 2^62", tensor(None, HUGE))
tensor_case(CORRUPT, "wrapped_offset", "an offset that wraps at 2^64", tensor(None, (1 << 64) - 1))
tensor_case(CORRUPT, "negative_offset", "an offset of -1", tensor(None, -1))
tensor_case(CORRUPT, "negative_size", "a size of -1", tensor(None, 0, (-1, 3), (3, 1)))
tensor_case(CORRUPT, "negative_sizes", "sizes whose product is right", tensor(None, 0, (-2, -3), (3, 1)))
tensor_case(CORRUPT, "negative_stride", "a stride of -1", tensor(None, 5, (6,), (-1,)))
tensor_case(CORRUPT, "large_stride", "a stride beyond the end", tensor(None, 0, (2, 3), (1000, 1)))
tensor_case(CORRUPT, "huge_stride", "a stride of 2^62", tensor(None, 0, (2, 3), (HUGE, 1)))
tensor_case(CORRUPT, "too_large", "more elements than there are", tensor(None, 0, (1000, 1000), (1000, 1)))
tensor_case(CORRUPT, "wrapped_size", "sizes whose product wraps to 0", tensor(None, 0, (1 << 32, 1 << 32), (0, 0)))
tensor_case(CORRUPT, "wrapped_bytes", "2^62 elements, whose bytes wrap to 0", tensor(None, 0, (HUGE,), (0,)))
tensor_case(CORRUPT, "four_terabytes", "4 TiB of one element", tensor(None, 0, (1 << 20, 1 << 20), (0, 0)))
tensor_case(
    CORRUPT,
    "gigabytes_twice",
    "many tensors of a few bytes each, together 64 GiB",
    listed(*(tensor(None, 0, (1 << 25, 8), (0, 0)) for _ in range(64))),
)
tensor_case(CORRUPT, "dims_1000", "1,000 dimensions", tensor(None, 0, (1,) * 1000, (1,) * 1000))
tensor_case(CORRUPT, "dims_differ", "more strides than sizes", tensor(None, 0, (2, 3), (3, 1, 1)))
tensor_case(CORRUPT, "size_of_text", "a size of text", tensor(None, 0, several(text("2")), (1,)))
tensor_case(CORRUPT, "size_of_bools", "a size of bools", tensor(None, 0, several(TRUE, TRUE), (1, 1)))
tensor_case(
    CORRUPT, "size_of_floats", "a size of floats", tensor(None, 0, several(b"G" + struct.pack(">d", 2.0)), (1,))
)
tensor_case(CORRUPT, "size_of_nan", "a size that is no number", tensor(None, 0, several(b"Fnan\n"), (1,)))
tensor_case(CORRUPT, "size_none", "no size", tensor(None, 0, NONE, (1,)))
tensor_case(CORRUPT, "size_list", "a size that is a list", tensor(None, 0, listed(number(2), number(3)), (3, 1)))
tensor_case(CORRUPT, "offset_text", "an offset of text", tensor(None, text("0")))
tensor_case(CORRUPT, "offset_bool", "an offset of bool", tensor(None, TRUE))
tensor_case(CORRUPT, "requires_grad", "requires_grad of text", tensor(requires_grad=text("yes")))
tensor_case(
    CORRUPT,
    "conjugate_float",
    "a conjugate of real numbers",
    tensor(None, 0, (2, 3), (3, 1), mapped(text("conj"), TRUE)),
)
tensor_case(
    UNSUPPORTED, "metadata", "metadata that is not known", tensor(None, 0, (2, 3), (3, 1), mapped(text("rot13"), TRUE))
)
tensor_case(CORRUPT, "storage_more", "a storage of more than its record", tensor(storage("0", 7)))
tensor_case(CORRUPT, "storage_less", "a storage of less than its record", tensor(storage("0", 5), 0, (5,), (1,)))
tensor_case(CORRUPT, "storage_huge", "a storage of 2^62 elements", tensor(storage("0", HUGE)))
tensor_case(CORRUPT, "storage_negative", "a storage of -6 elements", tensor(storage("0", -6)))
tensor_case(CORRUPT, "storage_wrapped", "a storage whose bytes wrap to 24", tensor(storage("0", HUGE + 6)))
tensor_case(
    CORRUPT, "storage_dtype", "a storage of doubles in the record of floats", tensor(storage("0", 6, "DoubleStorage"))
)
tensor_case(CORRUPT, "storage_missing", "a storage that is not there", tensor(storage("1")))
tensor_case(
    CORRUPT, "storage_path", "a storage that is another member", tensor(storage("../version", 0), 0, (0,), (1,))
)
tensor_case(UNSUPPORTED, "storage_class", "a storage of a class that there is not", tensor(storage(kind="EvilStorage")))
tensor_case(CORRUPT, "storage_key", "a storage whose key is a tuple", tensor(storage(several(text("0")))))
tensor_case(
    CORRUPT, "storage_shared", "one storage as two dtypes of one size",
    listed(tensor(storage("0", 6, "IntStorage")), tensor()),
)  # fmt: skip
tensor_case(
    CORRUPT, "dtype_of_text", "a dtype of text",
    called(
        name("torch._utils", "_rebuild_tensor_v3"), storage("0", 24, "UntypedStorage"), number(0), numbers(6),
        numbers(1), FALSE, HOOKS, text("float32"),
    ),
)  # fmt: skip
NINES = storage("1")
for _name in ("data", "real", "imag"):
    _state = mapped(text(_name), tensor(NINES))
    for _kind, _made in (
        ("parameter", called(name("torch._utils", "_rebuild_parameter_with_state"), tensor(), FALSE, HOOKS, _state)),
        ("tensor", of_type(name("torch", "Tensor"), _state)),
        ("slots", of_type(name("torch", "Tensor"), several(NONE, _state))),
        ("subclass", of_type(name("my", "Tensor"), _state)),
    ):
        tensor_case(CORRUPT, f"state_{_name}_{_kind}", f"a {_kind} whose state puts another tensor in its place", _made,
                    {"0": DATA, "1": OTHER})  # fmt: skip
tensor_case(DONE, "state", "a tensor with attributes", of_type(name("torch", "Tensor"), mapped(text("tag"), number(1))))
tensor_case(DONE, "state_of_a_subclass", "a class that means something else by data",
            of_type(name("my", "Tensor"), mapped(text("data"), number(1))))  # fmt: skip
tensor_case(CORRUPT, "build", "a state that puts another storage in its place",
            tensor() + several(NINES, number(0), numbers(2, 3), numbers(3, 1)) + b"b",
            {"0": DATA, "1": OTHER})  # fmt: skip
tensor_case(CORRUPT, "set_item", "a tensor whose element is set", tensor() + number(0) + number(9) + b"s")
tensor_case(CORRUPT, "append", "a tensor that is appended to", tensor() + number(9) + b"a")
tensor_case(DONE, "dtype_unknown", "a dtype that is kept as data", name("torch", "float128"))

# ---------------------------------------------------------------------------------- whole modules, and TorchScript


def module(
    parameters: bytes | None = None, modules: bytes | None = None, buffers: bytes | None = None, *more: bytes
) -> bytes:
    """A module as torch.save(model) pickles it, of a class that is nowhere."""
    fields = (
        *(text("_parameters"), mapped() if parameters is None else parameters),
        *(text("_buffers"), mapped() if buffers is None else buffers),
        *(text("_modules"), mapped() if modules is None else modules),
    )
    return name("models.yolo", "Model") + b")\x81q\x63" + mapped(*fields, *more) + b"b"


WEIGHT = mapped(text("w"), tensor())


# ---------------------------------------------------------------------------------------------------- plain pickles

for _name in ("os_system", "eval", "partial", "inst", "rebuild_from_type", "then_an_unknown_opcode"):
    add(
        "pickle",
        UNSAFE,
        f"plain_{_name}.pt",
        f"a pickle without an archive, {PAYLOADS[_name][0]}",
        lambda canary, make=PAYLOADS[_name][1]: pickled(make(canary), 4),
        live=True,
    )
add(
    "pickle",
    UNSAFE,
    "plain_protocol_0.pt",
    "a pickle without an archive, of protocol 0",
    lambda canary: b"cos\nsystem\n(S\"touch '" + canary.encode() + b"'\"\ntR.",
    live=True,
)
add(
    "pickle", UNSUPPORTED, "plain.pt", "a pickle without an archive that does nothing", pickled(mapped(text("a"), NONE))
)

# ------------------------------------------------------------------------------------------------- other containers

NOT_CHECKPOINTS = {
    "empty": (CORRUPT, "nothing", b""),
    "zeros": (CORRUPT, "zeros", bytes(5000)),
    "text": (CORRUPT, "text", b"hello\n" * 100),
    "html": (CORRUPT, "a page of a server that found nothing", b"<!DOCTYPE html><html>404</html>"),
    "lfs": (CORRUPT, "a pointer of git-lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
}
for _name, (_exit, _why, _data) in NOT_CHECKPOINTS.items():
    add("other", _exit, f"other_{_name}.pt", _why, _data)


def manifest() -> list[dict[str, object]]:
    from .every import ALL, ALL_DIRECTORIES

    return [
        {"file": case.file, "family": case.family, "exit": case.exit, "live": bool(case.live), "why": case.why}
        for case in (*ALL, *ALL_DIRECTORIES)
    ]


def manifest_text() -> str:
    rows = ",\n".join(json.dumps(row) for row in manifest())
    return f"[\n{rows}\n]\n"


def main() -> None:
    from .every import ALL, ALL_DIRECTORIES

    if sys.argv[1:] == ["--manifest"]:
        MANIFEST.write_text(manifest_text())
    else:
        target = Path(sys.argv[1])
        target.mkdir(parents=True, exist_ok=True)
        for case in ALL:
            (target / case.file).write_bytes(case.make(str(target / "canary")))
        for directory in ALL_DIRECTORIES:
            place = target / directory.file / "in"
            place.mkdir(parents=True)
            directory.make(place, str(target / "canary"))
        (target / "manifest.json").write_text(manifest_text())
        print(f"{len(ALL)} files and {len(ALL_DIRECTORIES)} directories in {target}")


if __name__ == "__main__":
    # Other modules import this one by its own name.
    from attacks import corpus

    corpus.main()
