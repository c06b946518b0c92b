"""Hostile, broken and odd files in the stream format, and those that two readers read differently."""

from __future__ import annotations

import struct

from attacks.assemble import (
    DATA,
    NONE,
    STREAM_STORAGE,
    called,
    listed,
    mapped,
    name,
    number,
    pickled,
    several,
    streamed,
    tensor,
    text,
    zipped,
)
from attacks.corpus import CORRUPT, DONE, OTHER, UNSAFE, UNSUPPORTED, Case, M
from attacks.live import SYSTEM, touch
from attacks.readers import Make, behind

FILES: list[Case] = []
W = mapped(text("w"), tensor(STREAM_STORAGE))
MAGIC = number(0x1950A86A20F9469CFC6C)


def _add(exit_code: int, file: str, why: str, made: bytes | Make, family: str = "stream", live: bool = False) -> None:
    make = made if callable(made) else lambda canary: made
    FILES.append(Case(file, family, exit_code, why, make, live=live, whole=exit_code != UNSAFE))


for _part in ("magic", "version", "machine", "keys"):
    _add(
        UNSAFE, f"live_stream_{_part}.pt", f"os.system where the stream format has {_part}",
        lambda canary, part=_part: streamed(W, **{part: pickled(called(SYSTEM, touch(canary)))}), live=True,
    )  # fmt: skip
_add(
    UNSAFE, "live_stream_object.pt", "os.system in the object of the stream format",
    lambda canary: streamed(mapped(text("w"), tensor(STREAM_STORAGE), text("x"), called(SYSTEM, touch(canary)))),
    live=True,
)  # fmt: skip
_add(
    UNSAFE, "scan_stream_second.pt", "a magic number that calls os.system first",
    lambda canary: streamed(W, magic=pickled(called(SYSTEM, touch(canary)) + b"0" + MAGIC)), "scanners", live=True,
)  # fmt: skip
_add(
    UNSAFE, "scan_stream_keys.pt", "the last pickle of five calls os.system",
    lambda canary: streamed(W, keys=pickled(called(SYSTEM, touch(canary)) + b"0" + listed(text("0")))), "scanners",
    live=True,
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------- broken

SOUND = streamed(W)


def _broken(file: str, why: str, made: bytes, exit_code: int = CORRUPT) -> None:
    _add(exit_code, f"stream_{file}.pt", why, made)


_broken("sound", "a valid file", SOUND, DONE)
_broken("cut_in_data", "cut in its data", SOUND[:-5])
_broken("cut_in_object", "cut in its object", SOUND[:100])
_broken("trailing", "something after the last storage", SOUND + b"x")
_broken("trailing_zeros", "zeros after the last storage", SOUND + bytes(4096))
_broken("keys_missing", "no keys", streamed(W, keys=pickled(listed())))
_broken("keys_twice", "a key twice", streamed(W, keys=pickled(listed(text("0"), text("0")))))
_broken("keys_other", "another key", streamed(W, keys=pickled(listed(text("7")))))
_broken("keys_dict", "keys that are a dict", streamed(W, keys=pickled(mapped(text("0"), NONE))))
for _file, _why, _count in (
    ("count", "a storage that says it has another number of elements", 7),
    ("count_negative", "a storage of -1 elements", -1),
    ("count_huge", "a storage of 2^62 elements", 1 << 62),
):
    _broken(_file, _why, SOUND[:-32] + struct.pack("<q", _count) + SOUND[-24:])
_broken("version", "another version", streamed(W, version=pickled(number(1002))), UNSUPPORTED)
_broken("machine", "facts about the machine that are none", streamed(W, machine=pickled(number(1))))
_broken("beyond", "a tensor beyond its storage", streamed(mapped(text("w"), tensor(STREAM_STORAGE, 1))))


def said(key: bytes, view: bytes = NONE, location: str = "cpu", numel: int = 6) -> bytes:
    return several(text("storage"), name("torch", "FloatStorage"), key, text(location), number(numel), view)


def view(key: bytes, offset: int = 0, numel: int = 6) -> bytes:
    return several(key, number(offset), number(numel))


_broken("view_beyond", "a view beyond its storage",
        streamed(mapped(text("w"), tensor(said(text("0"), view(text("1"), 4)) + b"Q"))))  # fmt: skip

# -------------------------------------------------------------------------------------------------------- two readers


def _two(file: str, why: str, pids: dict[str, bytes], keys: bytes, *storages: bytes) -> None:
    tensors = [part for key, pid in pids.items() for part in (text(key), tensor(pid + b"Q"))]
    stored = tuple((str(index), data) for index, data in enumerate(storages))
    _add(CORRUPT, f"two_stream_{file}.pt", why, streamed(mapped(*tensors), stored, keys=pickled(keys)), "readers")


_add(
    UNSAFE, "two_stream_before.pt", "a stream before an archive",
    behind(lambda canary: streamed(called(name("posix", "system"), text(f"touch '{canary}'")))), "readers", live=True,
)  # fmt: skip
_add(CORRUPT, "two_sound_stream_before.pt", "a sound stream before an archive", behind(lambda canary: SOUND), "readers")
_zip = zipped(M, comment=b" " * (-len(zipped(M)) % 4))
_add(CORRUPT, "two_stream_and_zip.pt", "a stream whose last storage is a zip archive", streamed(
    mapped(text("w"), tensor(STREAM_STORAGE), text("z"), tensor(
        said(text("1"), numel=len(_zip) // 4) + b"Q", 0, (1,), (1,)
    )), (("0", DATA), ("1", _zip)),
), "readers")  # fmt: skip

_TWO = listed(text("0"), text("1"))
_two("view_is_root", "a view with the key of another storage",
     {"v": said(text("1")), "w": said(text("0"), view(text("1")))}, _TWO, OTHER, DATA)  # fmt: skip
_two("root_is_view", "a storage with the key of a view before it",
     {"w": said(text("0"), view(text("1"))), "v": said(text("1"))}, _TWO, OTHER, DATA)  # fmt: skip
_two("view_is_itself", "a view with the key of its storage",
     {"w": said(text("0"), view(text("0"), 0, 6), numel=12)}, listed(text("0")), OTHER + DATA)  # fmt: skip
_two("view_number", "a view under a number, and under its digits",
     {"w": said(text("0"), view(number(5)), numel=12), "v": said(text("0"), view(text("5")), numel=12)},
     listed(text("0")), DATA + OTHER)  # fmt: skip
_two("number", "a storage under a number, and under its digits",
     {"w": said(text("0")), "v": said(number(0))}, listed(text("0")), DATA)  # fmt: skip
_two("keys_numbers", "numbers in the list of keys, and digits in the object",
     {"w": said(text("0"))}, listed(number(0)), DATA)  # fmt: skip
_two("meta", "a storage without data that has some elsewhere",
     {"w": said(text("0")), "v": said(text("0"), location="meta")}, listed(text("0")), DATA)  # fmt: skip
_two("big_key", "a key of 60,000 bytes", {"w": said(b"\x8b" + struct.pack("<i", 60000) + b"\x7f" * 60000)},
     listed(text("0")), DATA)  # fmt: skip
_two("big_view", "a view at an offset of 60,000 bytes", {"w": said(text("0"), several(
    text("5"), b"\x8b" + struct.pack("<i", 60000) + b"\x7f" * 60000, number(1)
))}, listed(text("0")), DATA)  # fmt: skip
