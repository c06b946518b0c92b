"""Puts together pickles and archives that no writer would write, byte by byte."""

from __future__ import annotations

import functools
import struct
import zlib
from dataclasses import dataclass, replace
from typing import Any

# ---------------------------------------------------------------------------------------------------------- pickles
# Each function gives the opcodes that leave one value on the stack. Without memo: what is said twice is there twice.


def name(module: str, attribute: str) -> bytes:
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def dotted(module: str, attribute: str) -> bytes:
    """A name with dots, which only STACK_GLOBAL of protocol 4 follows."""
    return text(module) + text(attribute) + b"\x93"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def raw(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def several(*items: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(items) + b"t"


def listed(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def mapped(*items: bytes) -> bytes:
    """A dict of keys and values in turn."""
    return b"}(" + b"".join(items) + b"u"


def called(function: bytes, *arguments: bytes) -> bytes:
    return function + several(*arguments) + b"R"


def dtype(code: str, flags: int | None = None, *, fields: dict[str, tuple[bytes, int]] | None = None) -> bytes:
    """A dtype of numpy with the state that numpy gives it: names, fields and their places, flags."""
    names = several(*map(text, fields)) if fields else b"N"
    parts = (part for key, (kind, at) in (fields or {}).items() for part in (text(key), several(kind, number(at))))
    size = number(int(code[1:])) if code[0] in "SVU" else number(-1)
    flags = 63 * (code[0] == "O") if flags is None else flags
    order = text("|" if code[0] in "OSV" else "<")
    state = (number(3), order, b"N", names, mapped(*parts) if fields else b"N", size, size, number(flags))
    return called(name("numpy", "dtype"), text(code), b"\x89", b"\x88") + several(*state) + b"b"


def numbers(*values: int) -> bytes:
    return several(*map(number, values))


@functools.cache
def _a_great_many() -> str:
    return ",".join(map(str, range(1_500_000)))


def many_numbers(between: str) -> str:
    """The numbers up to 1.5 million, with `between` between them: made once, as that takes long."""
    return _a_great_many().replace(",", between)


def storage(key: str | bytes = "0", numel: int = 6, kind: str = "FloatStorage", location: str = "cpu") -> bytes:
    key = text(key) if isinstance(key, str) else key
    return several(text("storage"), name("torch", kind), key, text(location), number(numel)) + b"Q"


FALSE, NONE, TRUE = b"\x89", b"N", b"\x88"
HOOKS = called(name("collections", "OrderedDict"))


def tensor(
    held: bytes | None = None,
    offset: bytes | int = 0,
    size: bytes | tuple[int, ...] = (2, 3),
    stride: bytes | tuple[int, ...] = (3, 1),
    *more: bytes,
    requires_grad: bytes = FALSE,
    function: str = "_rebuild_tensor_v2",
    hooks: bytes = HOOKS,
) -> bytes:
    return called(
        name("torch._utils", function),
        storage() if held is None else held,
        number(offset) if isinstance(offset, int) else offset,
        size if isinstance(size, bytes) else numbers(*size),
        stride if isinstance(stride, bytes) else numbers(*stride),
        requires_grad,
        hooks,
        *more,
    )


def pickled(value: bytes, protocol: int = 2) -> bytes:
    return bytes([0x80, protocol]) + value + b"."


# --------------------------------------------------------------------------------------------------------- archives


@dataclass(frozen=True)
class Member:
    """A member of a zip archive. What is None is as it should be; `local_` is what the header before the data says."""

    name: str | bytes
    data: bytes = b""
    method: int = 0
    flags: int = 0
    crc: int | None = None
    size: int | None = None
    packed: int | None = None
    header: int | None = None
    extra: bytes = b""
    local_name: bytes | None = None
    local_method: int | None = None
    local_flags: int | None = None
    local_size: int | None = None
    local_packed: int | None = None
    local_extra: bytes = b""
    attributes: int = 0
    signature: bytes = b"PK\x03\x04"

    def changed(self, **changes: Any) -> Member:
        return replace(self, **changes)


def members(pickle: bytes, storages: dict[str, bytes] | None = None, prefix: str = "archive") -> list[Member]:
    """What torch.save writes: by default for one storage "0" of six float32."""
    storages = {"0": DATA} if storages is None else storages
    return [
        Member(f"{prefix}/data.pkl", pickle),
        Member(f"{prefix}/byteorder", b"little"),
        *(Member(f"{prefix}/data/{key}", data) for key, data in storages.items()),
        Member(f"{prefix}/version", b"3\n"),
    ]


VALUES = (0.5, 1.5, -2.0, 3.25, 4.0, -0.0)
DATA = struct.pack("<6f", *VALUES)


def zipped(parts: list[Member], *, before: bytes = b"", after: bytes = b"", comment: bytes = b"", **end: int) -> bytes:
    """An archive of `parts`. `end` changes numbers of the end record: disk, count, size, start."""
    body = bytearray(before)
    entries = bytearray()
    for part in parts:
        raw_name = part.name if isinstance(part.name, bytes) else part.name.encode()
        data = part.data
        if part.method == 8:
            squeezer = zlib.compressobj(9, zlib.DEFLATED, -15)
            data = squeezer.compress(data) + squeezer.flush()
        size = len(part.data) if part.size is None else part.size
        packed = len(data) if part.packed is None else part.packed
        crc = zlib.crc32(part.data) if part.crc is None else part.crc
        header = len(body) if part.header is None else part.header
        local_name = raw_name if part.local_name is None else part.local_name
        body += struct.pack(
            "<4s5H3I2H",
            part.signature,
            20,
            part.flags if part.local_flags is None else part.local_flags,
            part.method if part.local_method is None else part.local_method,
            0,
            0,
            crc,
            packed if part.local_packed is None else part.local_packed,
            size if part.local_size is None else part.local_size,
            len(local_name),
            len(part.local_extra),
        )
        body += local_name + part.local_extra + data
        entries += struct.pack(
            "<4s6H3I5H2I",
            b"PK\x01\x02", 20, 20, part.flags, part.method, 0, 0, crc, packed, size,
            len(raw_name), len(part.extra), 0, 0, 0, part.attributes, header,
        )  # fmt: skip
        entries += raw_name + part.extra
    count = min(end.get("count", len(parts)), 0xFFFF)
    disk = end.get("disk", 0)
    size, start = end.get("size", len(entries)), end.get("start", len(body))
    last = struct.pack("<4s4H2IH", b"PK\x05\x06", disk, disk, count, count, size, start, len(comment))
    return bytes(body + entries) + last + comment + after


def wide(parts: list[Member], **numbers: int) -> bytes:
    """An archive with zip64 end records; `numbers` change what they say: where, count, size, start."""
    plain = zipped(parts)
    at = plain.rindex(b"PK\x05\x06")
    _, _, _, _, count, size, start, _ = struct.unpack("<4s4H2IH", plain[at:])
    told = {"where": at, "count": count, "size": size, "start": start} | numbers
    record = struct.pack(
        "<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, told["count"], told["count"], told["size"], told["start"]
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, told["where"], 1)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return plain[:at] + record + locator + end


def streamed(value: bytes, storages: tuple[tuple[str, bytes], ...] = (("0", DATA),), **parts: bytes) -> bytes:
    """The stream format: `value` is the object's opcodes; `parts` replace the pickles magic, version, machine, keys."""
    magic = parts.get("magic", pickled(number(0x1950A86A20F9469CFC6C)))
    version = parts.get("version", pickled(number(1001)))
    machine = parts.get("machine", pickled(mapped(text("little_endian"), TRUE, text("protocol_version"), number(1001))))
    keys = parts.get("keys", pickled(listed(*(text(key) for key, _ in storages))))
    counts = b"".join(struct.pack("<q", len(data) // 4) + data for _, data in storages)
    return magic + version + machine + pickled(value) + keys + counts


STREAM_STORAGE = several(text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), number(6), NONE) + b"Q"


def checkpoint(payload: bytes, key: bytes | None = None) -> bytes:
    """A state dict with a sound tensor and something else, as a pickle."""
    return pickled(mapped(text("w"), tensor(), text("x") if key is None else key, payload), 4)


def archive(payload: bytes) -> bytes:
    return zipped(members(checkpoint(payload)))
