"""First bytes of pickles, of numpy's arrays, and of archives that are not opened."""

from __future__ import annotations

import re
from typing import Any

from ckptconv.errors import CkptconvError, TruncatedError
from ckptconv.features.scan.bounds import LIMITS
from ckptconv.features.scan.grammar.judge import Judge
from ckptconv.formats.torch.container import begins_as_pickle
from ckptconv.formats.torch.objects import without_tensors
from ckptconv.pickles import watching
from ckptconv.pickles.machine import load
from ckptconv.storage.reading import Reader

# The bytes by which a file is recognized.
HEAD = 512

# Types of numbers, texts, times and raw bytes in a header of numpy.
_PLAIN_IN_NPY = re.compile(r"[<>|=]?[?biufcmMSaUV][0-9]*(?:\[\w+\])?")
# numpy itself reads no longer header by default.
_MOST_NPY = 10_000
# First bytes of archives and compressed files that are not opened here.
CLOSED = {
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"MSCF\0\0\0\0": "a cabinet archive",
    b"\x28\xb5\x2f\xfd": "compressed by zstandard",
    b"\x04\x22\x4d\x18": "compressed by LZ4",
    # A frame that both programs skip.
    **{bytes([first]) + b"\x2a\x4d\x18": "compressed by zstandard or LZ4" for first in range(0x50, 0x60)},
    b"LZIP": "compressed by lzip",
    b"ZF0x": "compressed by an old joblib",
}


def is_pickle(head: bytes, size: int) -> bool:
    return (head[:1] == b"\x80" and b"\x00" < head[1:2] <= b"\x05") or begins_as_pickle(head)


def may_be_pickle(reader: Reader, at: int) -> bool:
    head = reader.read_at(at, min(HEAD, reader.file.size - at))
    return is_pickle(head, len(head))


def begins_like_pickle(head: bytes, where: str) -> bool:
    """Return whether a pickle, or the beginning of a longer one, may begin with `head`, whatever its first opcodes
    are."""
    calls: list[watching.PickleReading] = []
    with watching.watched(calls.append, Judge):
        try:
            load(head, without_tensors(), where=where, limits=LIMITS)
        except TruncatedError:
            return True
        except CkptconvError:
            return any(reading.called or reading.unknown_calls for reading in calls)
    return True


def may_call(data: bytes) -> bool:
    """Return whether bytes have what a pickle needs to name a function: an opcode for it (and two lines, in old
    protocols), or a persistent id, which the unpickler looks up."""
    is_old = data.count(b"\n") > 1 and (b"c" in data or b"i" in data)
    return is_old or b"\x93" in data or b"P" in data or b"Q" in data


def place_of_header(head: bytes) -> tuple[int, int]:
    """Return the offset of the header of a numpy file, and its length."""
    begin = 12 if head[6:7] >= b"\x02" else 10
    return begin, int.from_bytes(head[8:begin], "little")


def header_in(head: bytes) -> bytes:
    begin, length = place_of_header(head)
    return head[begin : begin + length]


def is_plain(header: bytes) -> bool:
    """Return whether the dtype in a header of numpy (a Python literal) has no objects, which would be pickled."""
    import ast

    try:
        fields = ast.literal_eval(header[:_MOST_NPY].decode("latin-1").strip())
        return _are_plain(fields["descr"])
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        return False


def _are_plain(descr: Any) -> bool:
    if type(descr) is str:
        return _PLAIN_IN_NPY.fullmatch(descr) is not None
    if type(descr) is tuple:
        return len(descr) == 2 and _are_plain(descr[0])
    return type(descr) is list and all(type(part) is tuple and len(part) > 1 and _are_plain(part[1]) for part in descr)
