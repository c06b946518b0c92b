"""Changes sound checkpoints in ways that writers and attackers might, and converts them.

    python tests/fuzz.py [--seconds 60] [--seed N] [--reader zip|stream|zero|bits]

Every conversion ends in success or in one of our errors, soon and in little memory. A success has to be what torch
reads, where torch can read it. What fails is kept, with the seed and round that make it again.
"""

from __future__ import annotations

import argparse
import functools
import io
import pickletools
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attacks.assemble import Member, zipped
from checkpoints import ZERO, load_with_aliases

from ckptconv import planning
from ckptconv.conversion import convert
from ckptconv.errors import CkptconvError
from ckptconv.formats import open_source
from ckptconv.summary import summarize

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
SECONDS_EACH = 10
MEMORY = 512 << 20


# -------------------------------------------------------------------------------------------------------- mutations


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
    codes = opcodes(data)
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
    return b"".join(codes)


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


# ----------------------------------------------------------------------------------------------------- checkpoints


def trees() -> list[Any]:
    made = torch.Generator().manual_seed(0)
    flat = torch.randn(60, generator=made)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    return [
        {"a": torch.randn(3, 4, generator=made), "b": flat[5:20].view(3, 5), "c": flat[5:20].view(3, 5).t()},
        {"p": torch.nn.Parameter(torch.ones(2)), "n": {"x": [torch.arange(5), torch.tensor(1.5)], "y": (1, None)}},
        {
            "h": torch.randn(4, generator=made).half(),
            "u": torch.arange(6).to(torch.uint16),
            "e": torch.arange(3.0).expand(2, 3),
        },
        {
            "s": torch.eye(3).to_sparse(),
            "k": torch.randn(2, dtype=torch.complex64, generator=made).conj(),
            "z": torch.empty(0),
        },
        network.state_dict(),
    ]


def saved(tree: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree, buffer, **options)
    return buffer.getvalue()


def changed_zip(chance: random.Random) -> bytes:
    parts = members_of(chance.choice(_ZIPS))
    kind = chance.randrange(4)
    if kind == 0:
        return of_bytes(zipped(parts), chance)
    if kind == 1:
        return of_members(parts, chance)
    at = next(index for index, part in enumerate(parts) if str(part.name).endswith("data.pkl"))
    parts[at] = parts[at].changed(data=of_pickle(parts[at].data, chance))
    return zipped(parts)


def changed_stream(chance: random.Random) -> bytes:
    data = chance.choice(_STREAMS)
    if chance.random() < 0.3:
        return of_bytes(data, chance)
    pickles, at = [], 0
    for _ in range(5):
        stop = at + next(position for code, _, position in pickletools.genops(data[at:]) if code.name == "STOP") + 1
        pickles.append(data[at:stop])
        at = stop
    which = chance.choice([0, 1, 2, 3, 3, 3, 3, 4])
    pickles[which] = of_pickle(pickles[which], chance)
    return b"".join(pickles) + data[at:]


_TREES = trees()
_ZIPS = [saved(tree) for tree in _TREES] + [saved(_TREES[0], pickle_protocol=4)]
_STREAMS = [saved(tree, _use_new_zipfile_serialization=False) for tree in _TREES]


# ----------------------------------------------------------------------------------------------------------- checks


def outcome(path: Path, output: Path, **options: Any) -> str:
    """Convert and inspect a file; the kind of error it ends with, or "done"."""
    started = time.monotonic()
    try:
        convert(path, output, fsync=False, jobs=1, **options)
        summarize(open_source(path))
        kind = "done"
    except CkptconvError as error:
        kind = error.kind if error.message else "nothing said"
    assert kind == "done" or not output.exists(), "an output of a conversion that failed"
    assert kind != "nothing said"
    assert time.monotonic() - started < SECONDS_EACH, "it took too long"
    return kind


def flattened(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The strided tensors of a tree, with the names that they get; where names are not plain, nothing."""
    if isinstance(tree, torch.Tensor) and tree.layout == torch.strided:
        yield prefix, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if type(key) is str and "." not in key and key:
                yield from flattened(value, f"{prefix}.{key}" if prefix else key)
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            yield from flattened(value, f"{prefix}.{index}" if prefix else str(index))


def bits(tensor: torch.Tensor) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)  # whatever the strides are of dimensions of one element
    plain.copy_(tensor.detach())
    return bytes(plain.untyped_storage())


def check_success(path: Path, output: Path) -> bool:
    """Whether torch reads the file too; if it does, the tensors have to be the same."""
    signal.alarm(SECONDS_EACH)
    try:
        tree = torch.load(path, weights_only=True, map_location="cpu")
    except BaseException:
        return False
    finally:
        signal.alarm(0)
    got = load_with_aliases(output)
    for name, tensor in flattened(tree):
        found = got.get(name)
        if found is None or found.dtype != tensor.dtype or found.shape != tensor.shape:
            continue  # the name may be another's here; bits are only held against the same name
        assert bits(found) == bits(tensor), f"{name} is wrong"
    return True


def fuzz_files(make: Callable[[random.Random], bytes], chance: random.Random, place: Path) -> str:
    path, output = place / "model.pt", place / "out.safetensors"
    path.write_bytes(make(chance))
    kind = outcome(path, output)
    if kind == "done":
        kind += ", as torch reads it" if check_success(path, output) else ", which torch does not read"
        output.unlink()
    return kind


def fuzz_zero(chance: random.Random, place: Path) -> str:
    """A file of a DeepSpeed checkpoint with its pickle changed, or without one of its files."""
    case = chance.choice(["z1_bf16_w2", "z2_bf16_w2", "z3_bf16_w2", "z3_bf16_legacyfmt_w2", "moe_z2_ep2_w2"])
    checkpoint = place / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    shutil.copytree(ZERO / case / "checkpoint", checkpoint)
    victim = chance.choice(sorted(checkpoint.rglob("*.pt")))
    data = victim.read_bytes()
    kind = chance.randrange(8)
    if kind == 0:
        victim.unlink()
    elif kind == 1:
        text = chance.choice([b"", b"..", b"../..", b"/etc", b"a\0b", b"\xff\xfe", b"x" * 100_000, b"nowhere\n"])
        (checkpoint / "latest").write_bytes(text)
    elif kind == 2:
        victim.write_bytes(chance.choice(sorted(checkpoint.rglob("*.pt"))).read_bytes())
    elif kind == 3 or not data.startswith(b"PK"):
        victim.write_bytes(of_bytes(data, chance))
    else:
        parts = members_of(data)
        at = next(index for index, part in enumerate(parts) if str(part.name).endswith("data.pkl"))
        parts[at] = parts[at].changed(data=of_pickle(parts[at].data, chance))
        victim.write_bytes(zipped(parts))
    output = place / "out.safetensors"
    ended = outcome(checkpoint, output)
    if ended == "done" and kind < 3 and "z3" not in case:
        # The files that are there are sound: in their own places, or not at all. (Those of ZeRO-3 do not say whose they
        # are.)
        assert output.read_bytes() == sound(case), "files in the wrong places were converted"
    output.unlink(missing_ok=True)
    return ended


@functools.cache
def sound(case: str) -> bytes:
    """What the checkpoint is converted to as it is."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "out.safetensors"
        convert(ZERO / case / "checkpoint", output)
        return output.read_bytes()


def fuzz_bits(chance: random.Random, place: Path) -> str:
    """One flipped bit, with --checksum: refused, or right."""
    which = chance.randrange(2)  # of the others not everything is a tensor by its own name
    data = bytearray(_ZIPS[which])
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path, output = place / "model.pt", place / "out.safetensors"
    path.write_bytes(data)
    kind = outcome(path, output, checksum=True)
    if kind == "done":
        got = load_with_aliases(output)
        for name, tensor in flattened(_TREES[which]):
            assert torch.equal(got[name], tensor.detach()), f"{name} is wrong"
        output.unlink()
    return kind


READERS: dict[str, Callable[[random.Random, Path], str]] = {
    "zip": lambda chance, place: fuzz_files(changed_zip, chance, place),
    "stream": lambda chance, place: fuzz_files(changed_stream, chance, place),
    "zero": fuzz_zero,
    "bits": fuzz_bits,
}


def memory() -> int:
    """The most memory that this process has held."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def run(reader: str, seed: int, *, seconds: float = 0, rounds: int = 0) -> Counter[str]:
    """Fuzz `reader` for so many seconds or rounds; how often it ended how. AssertionError says what makes it again."""
    ends: Counter[str] = Counter()
    stop = time.monotonic() + seconds if seconds else float("inf")
    room, planning.ROOM_TO_GROW = planning.ROOM_TO_GROW, 1 << 20
    before = memory()
    try:
        with tempfile.TemporaryDirectory() as place:
            while time.monotonic() < stop and (not rounds or sum(ends.values()) < rounds):
                number = sum(ends.values())
                try:
                    ends[READERS[reader](random.Random(f"{seed} {number}"), Path(place))] += 1
                    assert memory() - before < MEMORY, "it took too much memory"
                except Exception as error:
                    kept = Path(tempfile.mkdtemp(prefix="fuzz-"))
                    shutil.copytree(place, kept, dirs_exist_ok=True)
                    raise AssertionError(f"{reader}, seed {seed}, round {number}, kept in {kept}: {error!r}") from error
    finally:
        planning.ROOM_TO_GROW = room
    return ends


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--reader", choices=READERS)
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if asked.seed is None else asked.seed
    chosen = [asked.reader] if asked.reader else list(READERS)
    print(f"seed {seed}")
    for each in chosen:
        ended = run(each, seed, seconds=asked.seconds / len(chosen))
        print(f"{each}: {sum(ended.values())} rounds: {', '.join(f'{n} {k}' for k, n in ended.most_common())}")
    sys.exit(0)
