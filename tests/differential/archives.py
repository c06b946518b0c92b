"""Cases of the containers: zip, tar and stream files changed field by field, one after or inside another, and sound.

A file is a model of itself, with every field that a writer may choose; steps change the model, and then it is written.
"""

from __future__ import annotations

import copy
import io
import random
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from attacks.assemble import DATA, mapped, members, number, pickled, several, storage, streamed, tensor, text
from mutations import NUMBERS, members_of, of_bytes, of_opcodes, opcodes
from samples import STREAMS, TREES, ZIPS, saved, saved_as_stream
from tar_writer import Part, Writer

from differential.cases import Case, Step

OTHER = struct.pack("<6f", 9, 8, 7, 6, 5, 4)
# Something that runs, where it is taken for the pickle.
LIVE = pickled(b"cos\nsystem\n" + several(text("true")) + b"R")
ODD = [0, 1, 2, 6, 8, 0x14, 0x800, 0xFFFF, 0xFFFFFFFF, 63, 64]


def two() -> bytes:
    """A pickle of two tensors, in storages of one size."""
    return pickled(mapped(text("a"), tensor(storage("0")), text("b"), tensor(storage("1"))))


# -------------------------------------------------------------------------------------------------------------- zip


@dataclass
class Entry:
    """A member: what the directory says of it (`central`) and what stands before its data (`local`), by field."""

    name: bytes
    data: bytes
    central: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)
    gap: bytes = b""  # before its local header
    after: bytes = b""  # after its data
    listed: bool = True
    written: bool = True


@dataclass
class Zip:
    entries: list[Entry]
    order: list[int] | None = None  # of the directory
    before: bytes = b""
    told: bool = True  # offsets count what is before
    tail: bytes = b""  # between the members and the directory
    ends: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    wide: dict[str, Any] | None = None
    comment: bytes = b""
    after: bytes = b""


# What a local header and an entry of the directory have alike, in this order.
_ALIKE = ("needed", "flags", "method", "time", "date", "crc", "packed", "size")


def _alike(facts: dict[str, Any]) -> list[Any]:
    return [facts[name] for name in _ALIKE]


def written(model: Zip) -> bytes:
    body, places = bytearray(model.before), []
    shift = 0 if model.told else len(model.before)
    for entry in model.entries:
        body += entry.gap
        places.append(len(body) - shift)
        if not entry.written:
            continue
        facts = _facts(entry) | entry.local
        name, extra = entry.local.get("name", entry.name), entry.local.get("extra", b"")
        body += struct.pack(
            "<4s5H3I2H",
            entry.local.get("signature", b"PK\3\4"),
            *_alike(facts),
            entry.local.get("name_length", len(name)),
            entry.local.get("extra_length", len(extra)),
        )
        body += name + extra + _payload(entry) + entry.after
    body += model.tail
    start, directory = len(body) - shift, bytearray()
    listed = [at for at, entry in enumerate(model.entries) if entry.listed]
    for at in [at for at in model.order or listed if at in listed] or listed:
        entry = model.entries[at]
        facts = _facts(entry) | entry.central
        name, extra = entry.central.get("name", entry.name), entry.central.get("extra", b"")
        comment = entry.central.get("comment", b"")
        directory += struct.pack(
            "<4s6H3I5H2I",
            entry.central.get("signature", b"PK\1\2"),
            facts["version"],
            *_alike(facts),
            entry.central.get("name_length", len(name)),
            len(extra),
            len(comment),
            facts["disk"],
            facts["internal"],
            facts["external"],
            entry.central.get("header", places[at]) % (1 << 32),
        )
        directory += name + extra + comment
    body += directory
    count = len(listed)
    if model.wide is not None:
        told = {
            "count": count, "size": len(directory), "start": start, "where": len(body) - shift, "disks": 1,
            "length": 44,
        }  # fmt: skip
        told |= model.wide
        body += struct.pack(
            "<4sQ2H2I4Q",
            b"PK\6\6",
            told["length"],
            45,
            45,
            0,
            0,
            told["count"],
            told["count"],
            told["size"],
            told["start"],
        )
        body += b"".join([told.get("gap", b"")]) + struct.pack(
            "<4sIQI", b"PK\6\7", told.get("disk", 0), told["where"], told["disks"]
        )
    for end in model.ends:
        told = {"disk": 0, "first": 0, "here": count, "count": count, "size": len(directory), "start": start} | end
        comment = end.get("comment", model.comment)
        body += struct.pack(
            "<4s4H2IH",
            b"PK\5\6",
            told["disk"],
            told["first"],
            told["here"] % 65536,
            told["count"] % 65536,
            told["size"] % (1 << 32),
            told["start"] % (1 << 32),
            end.get("length", len(comment)),
        )
        body += comment
    return bytes(body + model.after)


def _payload(entry: Entry) -> bytes:
    if entry.local.get("squeezed"):
        squeezer = zlib.compressobj(9, zlib.DEFLATED, -15)
        return squeezer.compress(entry.data) + squeezer.flush()
    return entry.data


def _facts(entry: Entry) -> dict[str, int]:
    return {
        "version": 20, "needed": 20, "flags": 0, "method": 8 if entry.local.get("squeezed") else 0, "time": 0,
        "date": 0, "crc": zlib.crc32(entry.data), "packed": len(_payload(entry)), "size": len(entry.data), "disk": 0,
        "internal": 0, "external": 0,
    }  # fmt: skip


def base_zip(chance: random.Random) -> Zip:
    if chance.random() < 0.6:
        found = members(two(), {"0": DATA, "1": OTHER})
        without = chance.choice(["", "", "byteorder", "version"])  # older releases wrote no byte order
        parts = [part for part in found if not without or not str(part.name).endswith(without)]
        order = {b"little": chance.choice([b"little", b"little", b"big"])}
        return Zip([Entry(str(part.name).encode(), order.get(part.data, part.data)) for part in parts])
    return Zip([Entry(str(part.name).encode(), part.data) for part in members_of(chance.choice(ZIPS))])


def _renamed(name: bytes, chance: random.Random) -> bytes:
    prefix, _, inner = name.partition(b"/")
    return chance.choice(
        [
            name.swapcase(), name.upper(), prefix + b"/" + inner.upper(), prefix.upper() + b"/" + inner,
            prefix + b"\\" + inner, name.replace(b"/", b"\\"), b"./" + name, b"/" + name, prefix + b"//" + inner,
            prefix + b"/./" + inner, b"../" + name, name + b"\0", name + b"\0x", name + b"/", name + b" ", inner,
            b"other/" + inner, prefix + b"/x/" + inner, name + b"\xe9", b"\xc3\xa9/" + inner, prefix + b"/data/00",
            prefix + b"/data/1", prefix + b"/byteorder", prefix + b"/data.pkl", prefix + b"/.data/0",
            prefix + b"/version", prefix + b"\0/" + inner, b"", prefix + b"/DATA.PKL", prefix + b"/BYTEORDER",
            prefix + b"/data/0",
        ]
    )  # fmt: skip


def _extra(chance: random.Random, entry: Entry) -> bytes:
    value = chance.choice([*NUMBERS, len(entry.data), 64])
    unicode = b"\1" + struct.pack("<I", zlib.crc32(entry.name)) + _renamed(entry.name, chance)
    return chance.choice(
        [
            struct.pack("<2H2Q", 1, 16, value, value), struct.pack("<2HQ", 1, 8, value),
            struct.pack("<2H3Q", 1, 24, len(entry.data), len(entry.data), value),
            struct.pack("<2H3QI", 1, 28, len(entry.data), len(entry.data), value, 0),
            struct.pack("<2H", 0x7075, len(unicode)) + unicode, b"FB" + struct.pack("<H", 60) + b"Z" * 60,
            b"FB" + struct.pack("<H", 60) + b"Z" * 10, bytes(chance.choice([1, 2, 3, 4, 5])),
            struct.pack("<2H2Q", 1, 16, len(entry.data), len(entry.data)) * 2, struct.pack("<2H", 1, 0),
        ]
    )  # fmt: skip


def zip_step(chance: random.Random, model: Zip) -> Step:
    """A change of an archive like `model`."""
    at = chance.randrange(len(model.entries))
    entry = model.entries[at]
    other = chance.choice(model.entries)
    side = chance.choice(["central", "local", "both"])
    roll = chance.randrange(24)

    def of_entry(label: str, change: Callable[[Entry], None]) -> Step:
        def act(zipped: Zip) -> None:
            change(zipped.entries[at])

        return Step(f"{entry.name.decode('latin-1')!r}: {label}", act)

    def of_fields(**values: Any) -> Step:
        def change(found: Entry) -> None:
            if side != "local":
                found.central.update(values)
            if side != "central":
                found.local.update(values)

        return of_entry(f"{side} {values}", change)

    def of_model(label: str, **values: Any) -> Step:
        return Step(label, lambda zipped: [setattr(zipped, name, value) for name, value in values.items()] and None)  # type: ignore[func-returns-value]

    if roll <= 3:
        name = chance.choice(
            ["flags", "method", "crc", "size", "packed", "needed", "external", "internal", "version", "time"]
        )
        limit = 1 << (32 if name in ("crc", "size", "packed", "external") else 16)
        near = [len(entry.data), len(entry.data) + 1, len(entry.data) - 1, len(entry.data) * 2, len(other.data)]
        pool = {
            "flags": [1, 2, 8, 9, 0x40, 0x800, 0x2000, 0x808],
            "method": [0, 8, 9, 12, 14, 99],
            "external": [0x10, 0x30, 1 << 30],
        }
        value = chance.choice([*pool.get(name, NUMBERS + near), 0]) % limit
        if name in ("size", "packed") and chance.random() < 0.5:
            return of_fields(size=value, packed=value)
        return of_fields(**{name: value})
    if roll <= 6:
        return of_fields(name=_renamed(chance.choice([entry, other]).name, chance))
    if roll <= 8:
        return of_fields(
            extra=_extra(chance, entry), **chance.choice([{}, {}, {"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF}])
        )
    if roll == 9:
        places = [0, 1, 30, 0xFFFFFFFF, *(len(part.name) + 30 for part in model.entries)]
        return of_entry(f"central header at {places[-1]}", lambda found: found.central.update(header=chance_of(places)))
    if roll <= 12:
        # Another member of the same name, or nearly.
        name = chance.choice([entry.name, _renamed(entry.name, chance), _renamed(other.name, chance)])
        pool = [entry.data, other.data, OTHER, DATA, LIVE, b"big", b"little", b"", of_bytes(entry.data or b"x", chance)]
        new = Entry(name, chance.choice(pool))
        where = chance.randrange(len(model.entries) + 1)
        new.listed = chance.random() < 0.85
        return Step(
            f"new member {name!r} of {new.data[:20]!r} at {where}",
            lambda zipped: zipped.entries.insert(where, copy.deepcopy(new)),
        )
    if roll == 13:
        fixed = chance.choice(
            [
                (b"constants.pkl", b""), (b"code/x.py", b""), (b"byteorder", b"big"), (b".format_version", b"1"),
                (b"BYTEORDER", b"big"), (b".storage_alignment", b"1"), (b"version", b"99"), (b"data/", b""),
            ]
        )  # fmt: skip
        name = entry.name.partition(b"/")[0] + b"/" + fixed[0]
        return Step(f"new member {name!r}: {fixed[1]!r}", lambda zipped: zipped.entries.append(Entry(name, fixed[1])))
    if roll == 14:
        order = list(range(len(model.entries) + 1))
        chance.shuffle(order)
        return of_model(f"directory in the order {order}", order=order)
    if roll == 15:
        gap = chance.choice([b"\0" * 7, b"PK\3\4", LIVE, b"x" * 40])
        return of_entry(f"{gap!r} before it", lambda found: setattr(found, "gap", gap))
    if roll == 16:
        crc, size = zlib.crc32(entry.data), len(entry.data)
        descriptor = chance.choice(
            [struct.pack("<4s3I", b"PK\7\x08", crc, size, size), struct.pack("<3I", crc, size, size)]
        )
        blank = {"flags": 8, "crc": 0, "size": 0, "packed": 0}

        def descend(found: Entry) -> None:
            found.after = descriptor
            found.local.update(blank)
            found.central["flags"] = 8

        return of_entry("sizes after its data", descend)
    if roll == 17:
        return of_entry("deflated", lambda found: found.local.update(squeezed=True))
    if roll == 18:
        what = chance.choice(["listed", "written"])
        return of_entry(f"not {what}", lambda found: setattr(found, what, False))
    if roll == 19:
        data = chance.choice(
            [
                LIVE,
                b"\0" * 7,
                b"x" * 600,
                an_archive(chance),
                b"PK\3\4",
                b"PK\5\6" + bytes(18),
                a_stream()[:400],
                a_stream(),
                pickled(number(1)),
                a_tar(),
                b"\x80\x02.",
                b"(",
                b"#!/bin/sh\n",
            ]
        )
        told = chance.random() < 0.6
        return of_model(f"{len(data)} bytes {data[:12]!r} before, told: {told}", before=data, told=told)
    if roll == 20:
        data = chance.choice(
            [b"\0", b"\0" * 22, an_archive(chance), b"PK\5\6" + bytes(18), LIVE, b"x" * 70000, b"PK\5\6"]
        )
        return of_model(f"{len(data)} bytes {data[:12]!r} after", after=data)
    if roll == 21:
        inner = an_archive(chance)
        end = inner[inner.rindex(b"PK\5\6") :]
        data = chance.choice(
            [
                b"a comment", b"x" * 65535, end, end + b"x", b"PK\5\6" + bytes(18), b"PK\5\6", inner[:60000],
                b"PK\5\6" * 9,
            ]
        )  # fmt: skip
        length = chance.choice([None, None, len(data) - 1, 0, len(data) + 1])

        def comment(zipped: Zip) -> None:
            zipped.comment = data
            if length is not None:
                zipped.ends[-1]["length"] = length % 65536

        return Step(f"comment of {len(data)} bytes {data[:12]!r}, told as {length}", comment)
    if roll == 22 and chance.random() < 0.4:
        # Two archives in one file: their end records decide which of them it is.
        inner = an_archive(chance)
        end = inner[inner.rindex(b"PK\5\6") :]
        end = chance.choice([end, end[:20] + struct.pack("<H", 9), end + b"x", b"x" + end])
        place = chance.choice(["comment", "after", "tail"])

        def both(zipped: Zip) -> None:
            zipped.before = inner
            setattr(zipped, place, end)

        return Step(f"an archive before, its end record ({len(end)} bytes) in {place}", both)
    if roll == 22:
        name = chance.choice(["disk", "first", "here", "count", "size", "start"])
        value = chance.choice([*ODD, 1, 2, 3, 0xFFFF, 0xFFFFFFFF])
        if chance.random() < 0.3:
            more = {name: value % 65536 if name in ("disk", "first", "here", "count") else value}
            return Step(
                f"a second end record: {more}", lambda zipped: zipped.ends.insert(chance_of([0, 1]), dict(more))
            )
        masked = value % 65536 if name in ("disk", "first", "here", "count") else value
        return Step(f"end record: {name} {masked}", lambda zipped: zipped.ends[-1].update({name: masked}))
    told_wide = chance.choice(
        [
            {}, {}, {"count": 1}, {"count": 2}, {"size": 46}, {"start": 0}, {"where": 0}, {"disks": 0}, {"disks": 2},
            {"length": 45}, {"length": 0}, {"gap": b"x" * 8}, {"disk": 1},
        ]
    )  # fmt: skip
    masks = chance.choice(
        [
            {},
            {"count": 0xFFFF, "here": 0xFFFF},
            {"size": 0xFFFFFFFF},
            {"start": 0xFFFFFFFF},
            {"count": 0xFFFF, "here": 0xFFFF, "size": 0xFFFFFFFF, "start": 0xFFFFFFFF},
        ]
    )

    def widen(zipped: Zip) -> None:
        zipped.wide = dict(told_wide)
        zipped.ends[-1].update(masks)

    return Step(f"zip64 end {told_wide}, end {masks}", widen)


def chance_of(choices: Sequence[Any]) -> Any:
    """One of a few, the same whenever the model is written."""
    return choices[len(choices) // 2]


def an_archive(chance: random.Random) -> bytes:
    """Another sound archive, which holds other tensors or something that runs."""
    pickle = chance.choice([two(), LIVE, pickled(mapped(text("b"), tensor()))])
    found = members(pickle, {"0": OTHER, "1": DATA}, chance.choice(["archive", "other"]))
    return written(Zip([Entry(str(part.name).encode(), part.data) for part in found]))


def a_stream() -> bytes:
    return streamed(
        mapped(
            text("w"),
            tensor(several(text("storage"), b"ctorch\nFloatStorage\n", text("0"), text("cpu"), number(6), b"N") + b"Q"),
        )
    )


def build_zip(base: Zip) -> Callable[[Sequence[Step]], bytes]:
    def build(steps: Sequence[Step]) -> bytes:
        model = copy.deepcopy(base)
        for step in steps:
            step.change(model)
        return written(model)

    return build


def a_zip(chance: random.Random) -> Case:
    roll = chance.random()
    if roll < 0.12:
        return honest_zip(chance)
    if roll < 0.2:
        data = of_bytes(chance.choice(ZIPS), chance)
        return Case([Step("bytes changed", lambda _: None)], lambda steps, data=data: data if steps else b"")  # type: ignore[misc]
    if roll < 0.25:
        first, second = an_archive(chance), an_archive(chance)
        return Case([first, second])
    base = base_zip(chance)
    steps = [zip_step(chance, base) for _ in range(chance.choice([1, 1, 1, 2, 2, 3, 5]))]
    return Case(steps, build_zip(base))


def honest_zip(chance: random.Random) -> Case:
    """What torch.save and usual tools for archives write."""
    tree = chance.choice(TREES)
    data = chance.choice([ZIPS[TREES.index(tree)], saved(tree, pickle_protocol=chance.choice([2, 3, 4, 5]))])
    if chance.random() < 0.5:
        buffer = io.BytesIO()
        with zipfile.ZipFile(
            buffer, "w", chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
        ) as archive:
            for part in members_of(data):
                info = zipfile.ZipInfo(str(part.name))
                with archive.open(info, "w", force_zip64=chance.random() < 0.3) as file:
                    file.write(part.data)
            archive.comment = chance.choice([b"", b"", b"weights of a model"])
        data = buffer.getvalue()
    return Case([data], honest=True)


# -------------------------------------------------------------------------------------------------------------- tar


@dataclass
class Block:
    """A member of a tar archive: its header's fields, by name, and its data."""

    name: bytes
    data: bytes
    fields: dict[str, Any] = field(default_factory=dict)
    gap: bytes = b""


@dataclass
class Tar:
    blocks: list[Block]
    before: bytes = b""
    end: bytes = bytes(1024)
    after: bytes = b""


def tarred(model: Tar) -> bytes:
    body = bytearray(model.before)
    for block in model.blocks:
        found = {
            "mode": b"0000644\0", "uid": b"0000000\0", "gid": b"0000000\0", "size": b"%011o\0" % len(block.data),
            "mtime": b"00000000000\0", "type": b"0", "link": b"", "magic": b"ustar\00000", "prefix": b"", "rest": b"",
        }  # fmt: skip
        found |= block.fields
        header = bytearray(512)
        for start, length, value in (
            (0, 100, found.get("name", block.name)),
            (100, 8, found["mode"]),
            (108, 8, found["uid"]),
            (116, 8, found["gid"]),
            (124, 12, found["size"]),
            (136, 12, found["mtime"]),
            (156, 1, found["type"]),
            (157, 100, found["link"]),
            (257, 8, found["magic"]),
            (345, 155, found["prefix"]),
            (500, 12, found["rest"]),
        ):
            header[start : start + length] = value[:length].ljust(length, b"\0")
        header[148:156] = b" " * 8
        total = sum(header) if not found.get("signed") else sum(byte - 256 if byte > 127 else byte for byte in header)
        header[148:156] = found.get("sum", b"%06o\0 ") % total if b"%" in found.get("sum", b"%") else found["sum"]
        body += block.gap + header + block.data + bytes(-len(block.data) % 512)
    return bytes(body + model.end + model.after)


def base_tar(chance: random.Random, other: bool = False) -> Tar:
    number = 9.0 if other else 1.0
    whole = torch.arange(6.0) * number
    tree = chance.choice(
        [{"w": whole.view(2, 3), "b": torch.ones(2).long()}, {"w": whole, "p": Part(whole, 1, 3)}, [whole, whole]]
    )
    with torch.random.fork_rng(devices=()):
        return Tar([Block(name.encode(), data) for name, data in _stable(tree).items()])


def _stable(tree: Any) -> dict[str, bytes]:
    """The members of a tree. Keys are addresses; tests must not depend on those: they are numbered."""
    with _numbered():
        return Writer(tree).members()


class _numbered:  # noqa: N801
    """While it lasts, `Writer` names storages and tensors by numbers."""

    def __enter__(self) -> None:
        self.before = Writer.key_of, Writer.persistent_id
        seen: dict[int, int] = {}
        before = Writer.key_of
        Writer.key_of = staticmethod(lambda tensor: seen.setdefault(before(tensor), 100 + len(seen)))  # type: ignore[method-assign]

        def persistent_id(writer: Writer, value: Any) -> Any:
            found = self.before[1](writer, value)
            if isinstance(value, torch.Tensor):
                number = seen.setdefault(id(value), 100 + len(seen))
                writer.tensors.pop(found, None)
                writer.tensors[number] = value
                return number
            return found

        Writer.persistent_id = persistent_id  # type: ignore[method-assign]

    def __exit__(self, *_: Any) -> None:
        Writer.key_of, Writer.persistent_id = staticmethod(self.before[0]), self.before[1]  # type: ignore[method-assign]


def a_tar() -> bytes:
    return tarred(base_tar(random.Random(0), other=True))


def pax(**records: str) -> bytes:
    out = b""
    for key, value in records.items():
        body = b" " + key.replace("__", ".").encode() + b"=" + value.encode() + b"\n"
        length = len(body) + 2 if len(body) < 8 else len(body) + (2 if len(body) + 2 < 100 else 3)
        out += str(length).encode() + body
    return out


def tar_step(chance: random.Random, model: Tar) -> Step:
    at = chance.randrange(len(model.blocks))
    block = model.blocks[at]
    roll = chance.randrange(12)

    def of_block(label: str, change: Callable[[Block], None]) -> Step:
        def act(tar: Tar) -> None:
            change(tar.blocks[at])

        return Step(f"{block.name.decode()}: {label}", act)

    def inserted(label: str, *blocks: Block) -> Step:
        where = chance.choice([at, at, len(model.blocks), 0])

        def act(tar: Tar) -> None:
            tar.blocks[where:where] = copy.deepcopy(blocks)

        return Step(f"{label} at {where}", act)

    if roll <= 2:
        size = len(block.data)
        name, values = chance.choice(
            [
                (
                    "type",
                    [
                        b"1", b"2", b"3", b"5", b"7", b"\0", b"S", b"D", b"Z", b"A", b"g", b"x", b"L", b"K", b"X",
                        b"V", b"M",
                    ],
                ),
                (
                    "size",
                    [
                        b"%o\0" % size, b"%11o " % size, b"\x80" + size.to_bytes(11, "big"), b"\xff" * 12,
                        b"00000000000\0", b"%011o\0" % (size + 512), b"0o%o\0" % size, b"+%o\0" % size, b"-1\0",
                        b"\x80" + bytes(11), b"%o 1\0" % size, b"%o\0junk" % size, b"%012o" % size, b"1_0\0",
                    ],
                ),
                ("magic", [b"ustar  \0", bytes(8), b"ustar\0  ", b"USTAR\00000", b"ustar\00001", b"ustarxxx"]),
                ("prefix", [b"x", b".", b"/", b"a/b", b"./"]),
                (
                    "name",
                    [
                        block.name + b"/", b"./" + block.name, b"/" + block.name, block.name.upper(),
                        block.name + b"\0x", b"x/../" + block.name, chance.choice(model.blocks).name,
                        block.name + b"\xff", b"",
                    ],
                ),
                ("sum", [b"%07o\0", b"%6o\0 ", b"000000\0 ", b"%o", b" %05o\0 "]),
                ("signed", [True]),
                ("link", [chance.choice(model.blocks).name, b"x"]),
                ("rest", [b"x" * 12, b"tar\0"]),
                ("mode", [b"\xff" * 8, b"x" * 8]),
            ]
        )  # fmt: skip
        value = chance.choice(values)
        return of_block(f"{name} {value!r}", lambda found: found.fields.update({name: value}))
    if roll <= 5:
        other = chance.choice(model.blocks).name.decode()
        size = chance.choice([len(block.data), 0, 512, len(block.data) + 512, 1 << 40])
        records = chance.choice(
            [
                {"path": other}, {"path": "x"}, {"size": f"{size}"}, {"size": f" {size}"}, {"size": f"+{size}"},
                {"size": f"{size}.0"}, {"path": other + "/"}, {"path": "./" + other},
                {"GNU__sparse__major": "1", "GNU__sparse__minor": "0"}, {"path": ""}, {"GNU__sparse__map": "0,5"},
                {"GNU__sparse__size": "3"}, {"hdrcharset": "BINARY"}, {"linkpath": other},
                {"GNU__sparse__name": other}, {"size": "", "path": other}, {"path": other, "size": f"{size}"},
                {"path": "x\0y"}, {"mtime": "x"}, {"comment": "c"},
            ]
        )  # fmt: skip
        kind = chance.choice([b"x", b"x", b"g", b"X"])
        return inserted(f"pax {kind!r} {records}", Block(b"pax", pax(**records), {"type": kind}))
    if roll == 6:
        kind = chance.choice([b"L", b"L", b"K"])
        long = chance.choice(model.blocks).name + chance.choice([b"\0", b"", b"/", b"\0x", b" "])
        return inserted(f"{kind!r} {long!r}", Block(b"././@LongLink", long, {"type": kind}))
    if roll == 7:
        other = chance.choice(base_tar(chance, other=True).blocks)
        kind = chance.choice([b"0", b"\0", b"7", b"1", b"5"])
        return inserted(f"another {other.name!r} of type {kind!r}", Block(other.name, other.data, {"type": kind}))
    if roll == 8:
        hidden = tarred(Tar(base_tar(chance, other=True).blocks, end=b""))
        kind = chance.choice([b"5", b"1", b"2", b"3", b"4", b"6", b"7", b"D"])
        return inserted(f"members inside one of type {kind!r}", Block(b"d", hidden, {"type": kind}))
    if roll == 9:
        data = chance.choice([b"", bytes(512), bytes(1024), b"x" * 512, bytes(1536)])
        return Step(f"ends with {len(data)} bytes {data[:2]!r}", lambda tar: setattr(tar, "end", data))
    if roll == 10:
        data = chance.choice([a_tar(), an_archive(chance), b"x", bytes(512), LIVE, a_stream()])
        name = chance.choice(["after", "after", "before"])
        return Step(f"{name} it {len(data)} bytes {data[:8]!r}", lambda tar: setattr(tar, name, data))
    if block.name == b"pickle":
        data = b"".join(of_opcodes(opcodes(block.data), chance))
    else:
        data = of_bytes(block.data, chance)
    return of_block("content changed", lambda found: setattr(found, "data", data))


def a_tar_case(chance: random.Random) -> Case:
    base = base_tar(chance)
    if chance.random() < 0.1:
        return Case([honest_tar(base, chance)], honest=True)
    if chance.random() < 0.15:
        # The old form of headers, in front of an archive.
        for block in base.blocks:
            block.fields["magic"] = chance.choice([bytes(8), b"ustar  \0"])
    steps = [tar_step(chance, base) for _ in range(chance.choice([1, 1, 1, 2, 3]))]

    def build(chosen: Sequence[Step]) -> bytes:
        model = copy.deepcopy(base)
        for step in chosen:
            step.change(model)
        return tarred(model)

    return Case(steps, build)


def honest_tar(base: Tar, chance: random.Random) -> bytes:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.tar"
        with tarfile.open(
            path, "w", format=chance.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
        ) as archive:
            for block in base.blocks:
                info = tarfile.TarInfo(block.name.decode())
                info.size, info.mtime = len(block.data), 1479513600
                archive.addfile(info, io.BytesIO(block.data))
        return path.read_bytes()


# ----------------------------------------------------------------------------------------------------------- stream


def stream_value(chance: random.Random) -> tuple[bytes, list[tuple[str, bytes]]]:
    """The opcodes of an object in a stream, and the storages it needs."""
    keys = ["0", "1", "2"][: chance.choice([1, 2, 2, 3])]
    parts = []
    for at in range(chance.randrange(1, 4)):
        key = chance.choice(keys)
        kind = chance.choice(
            ["FloatStorage"] * 6 + ["IntStorage", "ByteStorage", "DoubleStorage", "UntypedStorage", "HalfStorage"]
        )
        numel = chance.choice([6] * 6 + [3, 12, 24, 0, 5, 7])
        view = b"N"
        if chance.random() < 0.4:
            name = chance.choice(["v", "w", *keys])
            view = several(
                chance.choice([text(name), text(name), number(5)]),
                number(chance.choice([0, 0, 1, 3, 6, -1])),
                number(chance.choice([6, 3, 0, 7, 2])),
            )
        shape = chance.choice([(2, 3), (6,), (3,), (2,), (0,), ()])
        strides = {(2, 3): (3, 1), (): ()}.get(shape, (1,))
        first = chance.choice([text(key)] * 6 + [number(int(key)), several(text(key))])
        pid = several(text("storage"), f"ctorch\n{kind}\n".encode(), first, text("cpu"), number(numel), view) + b"Q"
        parts.append(text(f"t{at}") + tensor(pid, chance.choice([0, 0, 0, 1]), shape, strides))
    values = [DATA, OTHER, bytes(range(24))]
    return mapped(*parts), [(key, values[at]) for at, key in enumerate(keys)]


def a_stream_case(chance: random.Random) -> Case:
    roll = chance.random()
    if roll < 0.1:
        return Case([saved_as_stream(chance.choice(TREES), pickle_protocol=chance.choice([2, 3, 4]))], honest=True)
    if roll < 0.4:
        value, storages = stream_value(chance)
        chance.shuffle(storages)
        parts = [streamed(value, tuple(storages))]
        if chance.random() < 0.2:
            parts.append(chance.choice([a_stream(), an_archive(chance), b"x", LIVE]))
        if chance.random() < 0.1:
            parts.insert(0, chance.choice([a_tar()[:512], LIVE, pickled(b"N"), b"\x95" + bytes(8)]))
        return Case(parts)
    data = a_stream() if chance.random() < 0.4 else chance.choice(STREAMS)
    if roll < 0.5:
        return Case([of_bytes(data, chance)])
    parts, at = [], 0
    for _ in range(5):
        found = _first_pickle(data[at:])
        parts.append(found)
        at += sum(map(len, found))
    which = chance.choice([0, 1, 2, 3, 3, 3, 3, 4])
    if chance.random() < 0.2:
        # A frame that does not end where its pickle ends, or does.
        inside = sum(map(len, parts[which][1:]))
        parts[which].insert(1, b"\x95" + struct.pack("<Q", inside + chance.choice([-1, 0, 0, 1, 2, 8])))
    else:
        parts[which] = of_opcodes(parts[which], chance)
    return Case([code for part in parts for code in part] + [data[at:]])


def _first_pickle(data: bytes) -> list[bytes]:
    """The opcodes of the pickle that `data` begins with."""
    import pickletools

    starts, stop = [], len(data)
    for code, _, position in pickletools.genops(data):
        starts.append(position)
        if code.name == "STOP":
            stop = position + 1
            break
    return [data[start:end] for start, end in zip(starts, [*starts[1:], stop], strict=True)]
