"""Changes of sound files that writers and attackers might make: of pickles, of bytes, of archives, of JSON."""

from __future__ import annotations

import copy
import io
import json
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

from attacks.assemble import Member, zipped

# Numbers at which something goes wrong, if it goes wrong at all.
NUMBERS = [0, 1, 2, 3, 7, 8, 24, 63, 64, 127, 128, 255, 256, 65535, 65536, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62]
NUMBERS += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1]
NAMES = [
    ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3"), ("torch", "FloatStorage"),
    ("torch", "DoubleStorage"), ("torch", "ByteStorage"), ("torch.storage", "UntypedStorage"), ("torch", "Size"),
    ("torch._utils", "_rebuild_parameter"), ("torch", "float16"), ("collections", "OrderedDict"),
    ("collections", "defaultdict"), ("builtins", "set"), ("builtins", "getattr"), ("my.module", "Thing"),
    ("torch._tensor", "_rebuild_from_type_v2"), ("torch._utils", "_rebuild_qtensor"), ("_codecs", "encode"),
    ("torch._utils", "_rebuild_sparse_tensor"), ("torch", "device"), ("numpy", "dtype"),
]  # fmt: skip


def opcodes(data: bytes) -> list[bytes]:
    """A pickle as the opcodes that it consists of."""
    starts = [position for _, _, position in pickletools.genops(data)]
    return [data[start:stop] for start, stop in zip(starts, [*starts[1:], len(data)], strict=True)]


def an_integer(chance: random.Random) -> bytes:
    value = chance.choice(NUMBERS) + chance.choice([0, 0, -1, 1]) * chance.choice([1, 4])
    value *= chance.choice([1, 1, 1, -1])
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def an_opcode(chance: random.Random) -> bytes:
    """An opcode with an argument that makes sense for it."""
    module, name = chance.choice(NAMES)
    return chance.choice(
        [
            an_integer(chance),
            b"c" + module.encode() + b"\n" + name.encode() + b"\n",
            b"h" + bytes([chance.randrange(64)]),
            b"q" + bytes([chance.randrange(256)]),
            b"r" + struct.pack("<I", chance.choice(NUMBERS) % (1 << 32)),
            b"X" + struct.pack("<I", chance.choice([0, 1, 3, 1 << 31])) + b"abc",
            bytes([chance.choice(b"0123()[]{}NRbeaustoi}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94Q.")]),
        ]
    )


def of_pickle(data: bytes, chance: random.Random) -> bytes:
    """A pickle with a few opcodes changed, added, taken out, repeated or moved."""
    return b"".join(of_opcodes(opcodes(data), chance))


def of_opcodes(codes: list[bytes], chance: random.Random) -> list[bytes]:
    """The opcodes of a pickle with a few changed, added, taken out, repeated or moved."""
    codes = [*codes]
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        at = chance.randrange(len(codes))
        kind = chance.randrange(7)
        if kind == 0:
            numbers = [i for i, code in enumerate(codes) if code[:1] in b"KMJ\x8a"]
            codes[chance.choice(numbers) if numbers else at] = an_integer(chance)
        elif kind == 1:
            names = [i for i, code in enumerate(codes) if code[:1] == b"c"]
            module, name = chance.choice(NAMES)
            codes[chance.choice(names) if names else at] = f"c{module}\n{name}\n".encode()
        elif kind == 2:
            codes.insert(at, an_opcode(chance))
        elif kind == 3:
            del codes[at]
            codes = codes or [b"."]
        elif kind == 4:
            stop = min(at + chance.randrange(1, 30), len(codes))
            codes[at:at] = codes[at:stop]
        elif kind == 5:
            other = chance.randrange(len(codes))
            codes[at], codes[other] = codes[other], codes[at]
        else:
            codes[at] = an_opcode(chance)
    return codes


def of_bytes(data: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, overwritten, taken out, put in, repeated."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5])):
        # Descriptions are at the ends.
        span = min(len(changed), 2000)
        at = chance.choice([chance.randrange(len(changed)), chance.randrange(span), -1 - chance.randrange(span)])
        at %= len(changed)
        width = chance.choice([1, 2, 4, 8])
        value = chance.choice(NUMBERS) % (1 << 8 * width)
        kind = chance.randrange(5)
        if kind == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at : at + width] = value.to_bytes(width, "little")
        elif kind == 2:
            del changed[at : at + width]
        elif kind == 3:
            changed[at:at] = value.to_bytes(width, "little")
        else:
            changed[at:at] = changed[at : at + chance.randrange(200)]
        if not changed:
            changed = bytearray(b"\0")
    if chance.random() < 0.1:
        del changed[chance.randrange(len(changed)) :]
    return bytes(changed)


def members_of(data: bytes) -> list[Member]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [Member(info.filename, archive.read(info)) for info in archive.infolist()]


def of_members(parts: list[Member], chance: random.Random) -> bytes:
    """An archive whose members and numbers do not fit each other."""
    at = chance.randrange(len(parts))
    part = parts[at]
    number = chance.choice(NUMBERS)
    narrow, flags = number % (1 << 32), chance.choice([0, 1, 8, 0x800, 0x2000])
    changes: list[Callable[[], Member]] = [
        lambda: part.changed(size=narrow),
        lambda: part.changed(packed=narrow),
        lambda: part.changed(size=narrow, packed=narrow),
        lambda: part.changed(header=narrow),
        lambda: part.changed(method=chance.choice([1, 8, 12, 99])),
        lambda: part.changed(local_method=8),
        lambda: part.changed(method=8, local_method=chance.choice([0, 8])),
        lambda: part.changed(flags=flags),
        lambda: part.changed(local_flags=flags),
        lambda: part.changed(crc=chance.choice([0, 1, narrow])),
        lambda: part.changed(local_size=narrow),
        lambda: part.changed(attributes=narrow),
        lambda: part.changed(name=str(part.name).swapcase()),
        lambda: part.changed(local_extra=bytes(chance.randrange(70))),
        lambda: part.changed(local_name=b"x" * chance.randrange(40)),
        lambda: part.changed(extra=struct.pack("<2H2Q", 1, 16, number, number), size=0xFFFFFFFF, packed=0xFFFFFFFF),
        lambda: part.changed(name=chance.choice(parts).name),
        lambda: part.changed(data=of_bytes(part.data, chance) if part.data else b"x"),
        lambda: part.changed(data=part.data[: chance.randrange(len(part.data) + 1)]),
    ]
    parts = [*parts]
    parts[at] = chance.choice(changes)()
    if chance.random() < 0.3:
        parts.insert(chance.randrange(len(parts)), parts.pop())
    if chance.random() < 0.2:
        del parts[chance.randrange(len(parts))]
    end = {chance.choice(["count", "size", "start", "disk"]): narrow % 60000} if chance.random() < 0.2 else {}
    return zipped(parts, before=bytes(chance.choice([0] * 9 + [5])), after=bytes(chance.choice([0] * 9 + [5])), **end)


# What may stand in a header, an index or a record, somewhere.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 0.5, 1e308, 1 << 31, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 64, "", "a", "w",
    "0", "float32", "float64", "complex128", "quint8", "parameter", "os.system", "..", "/etc/passwd", "\ud800",
    "F32", "I8", [], {}, [0, 0], [2, 3], [[]], ["@", 0], ["@", 1], ["@", 7], ["list", ["@", 0]], ["tuple", ["@",
    0]], ["dict", 1, 2], ["odict", None], ["set", 1], ["frozenset", ["@", 0]], ["float", "0.1"], ["float",
    "nan:7ff8000000000000"], ["int", "0xffffffffffffffffff"], ["bytes", "AAAA"], ["size", 2, 3], ["deque", None, 1],
    ["torch", "dtype", "float32"], ["torch", "device", "cuda:0"], ["global", "os", "system"], ["opaque", ["global",
    "os", "system"], ["tuple", "id"]], ["composite", "meta"], ["numpy.scalar", "<f8", ["bytes", "AAAAAAAAAAA="]],
    {"name": "a"}, {"is": 0}, {"dropped": "a"}, {"storage": [0, 0]}, {"storage": [0, 1, [1]]}, {"kind": "parameter",
    "requires_grad": True}, {"view": "complex128"}, {"attributes": 0}, {"dtype": "F32", "shape": [1],
    "data_offsets": [0, 4]},
]  # fmt: skip


def of_json(value: Any, chance: random.Random) -> str:
    """A JSON text with a few of its values replaced, moved, repeated or taken out."""
    holder = [copy.deepcopy(value)]
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        places: list[tuple[Any, Any]] = []
        stack: list[Any] = [holder]
        while stack:
            inside = stack.pop()
            for key, child in inside.items() if isinstance(inside, dict) else enumerate(inside):
                places.append((inside, key))
                if isinstance(child, (dict, list)):
                    stack.append(child)
        inside, key = chance.choice(places)
        kind = chance.randrange(6)
        if kind == 0 and inside is not holder:
            del inside[key]
        elif kind == 1 and isinstance(inside, list) and inside is not holder:
            inside.insert(key, copy.deepcopy(chance.choice(VALUES)))
        elif kind == 2 and isinstance(inside, dict):
            inside[chance.choice(["a", "w", "is", "name", "storage", "view", "strides", "__metadata__"])] = inside.pop(
                key
            )
        elif kind == 3 and type(inside[key]) is int:
            inside[key] += chance.choice([-8, -4, -1, 1, 4, 8])
        elif kind == 4:
            other, name = chance.choice(places)
            inside[key] = copy.deepcopy(other[name]) if name in other or isinstance(other, list) else None
        else:
            inside[key] = copy.deepcopy(chance.choice(VALUES))
    changed = json.dumps(holder[0])
    if chance.random() < 0.1:
        at = chance.randrange(len(changed))
        changed = changed[:at] + chance.choice(["{", "[", '"', ",", "NaN", "9" * 30, "\\u0000"]) + changed[at:]
    return changed
