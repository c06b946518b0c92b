"""Cases of tensors: persistent ids, views and rebuilding functions with odd arguments."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attacks.assemble import (
    DATA,
    FALSE,
    HOOKS,
    NONE,
    TRUE,
    called,
    members,
    name,
    number,
    numbers,
    several,
    text,
    zipped,
)
from mutations import members_of, of_opcodes, opcodes
from samples import TREES, saved

from differential.archives import OTHER
from differential.cases import Case
from differential.pickles import INT_TEXTS

STORAGES = {"0": DATA, "1": OTHER, "2": bytes(range(24)), "3": b"", "4": bytes(48)}
KINDS = [
    "FloatStorage", "FloatStorage", "FloatStorage", "FloatStorage", "DoubleStorage", "HalfStorage", "IntStorage",
    "LongStorage", "ByteStorage", "BoolStorage", "UntypedStorage", "ComplexFloatStorage", "BFloat16Storage",
    "QUInt8Storage", "QInt8Storage", "QInt32Storage", "QUInt4x2Storage", "ShortStorage",
]  # fmt: skip
WIDTHS = {
    "Float": 4, "Double": 8, "Half": 2, "Int": 4, "Long": 8, "Byte": 1, "Bool": 1, "Untyped": 1, "ComplexFloat": 8,
    "BFloat16": 2, "QUInt8": 1, "QInt8": 1, "QInt32": 4, "QUInt4x2": 1, "Short": 2,
}  # fmt: skip
SHAPES = [
    ((2, 3), (3, 1)), ((6,), (1,)), ((3,), (2,)), ((), ()), ((0,), (1,)), ((3, 2), (1, 3)), ((2, 2), (1, 1)),
    ((2, 3), (0, 1)), ((1, 6), (7, 1)), ((6, 1), (1, 99)), ((2, 0, 3), (0, 0, 1)), ((24,), (1,)), ((12,), (1,)),
    ((1,), (1,)),
]  # fmt: skip
SMALL = [((3,), (1,)), ((1, 3), (3, 1)), ((2,), (1,)), ((), ()), ((3, 1), (1, 1))]
DTYPES = """
    float32 float64 float16 int32 int64 uint8 bool complex64 bfloat16 uint16 uint32 uint64 float8_e4m3fn int8 bits8
    quint8
""".split()  # noqa: SIM905


def an_int(value: int, chance: random.Random) -> bytes:
    """A number in one of its forms; rarely one that is no plain integer."""
    forms = [number(value)] * 8
    if 0 <= value < 256:
        forms += [b"K" + bytes([value])] * 8 + [b"I%d\n" % value, b"L%dL\n" % value]
    if chance.random() < 0.01:
        forms = [
            b"\x88" if value else b"\x89", b"G" + struct.pack(">d", value), text(str(value)),
            b"I" + chance.choice(INT_TEXTS).encode() + b"\n", number(-1), NONE,
        ]  # fmt: skip
    return chance.choice(forms)


def mostly(usual: Any, odd: Sequence[Any], chance: random.Random) -> Any:
    """What is usual; one time in thirty something else: of a tensor's many parts, few are odd at a time."""
    return chance.choice(odd) if chance.random() < 0.03 else usual


def storage(chance: random.Random, kind: str | None = None, key: str | None = None) -> bytes:
    kind = kind or chance.choice(KINDS)
    key = key or mostly(chance.choice(["0", "0", "1", "2"]), ["3", "4"], chance)
    numel = len(STORAGES[key]) // WIDTHS[kind.removesuffix("Storage")]
    numel = mostly(numel, [0, numel - 1, numel + 1, numel * 2, 6], chance)
    others = [number(int(key)), b"U" + bytes([len(key)]) + key.encode(), text("0" + key), text(key + " ")]
    spelled = mostly(text(key), others, chance)
    module = mostly("torch", ["torch.cuda", "torch.storage", "my"], chance)
    place = mostly("cpu", ["cuda:0", "meta", "mps", ""], chance)
    tag = mostly(text("storage"), [b"C\x07storage", text("module")], chance)
    return several(tag, name(module, kind), spelled, text(place), an_int(numel, chance)) + b"Q"


def geometry(chance: random.Random) -> tuple[bytes, bytes, bytes]:
    """Opcodes for an offset, a size and strides, which most storages have room for."""
    shape, strides = chance.choice([SMALL, SMALL, SHAPES])[chance.randrange(5)]
    shape, strides = mostly((shape, strides), SHAPES, chance)
    size, stride = (several(*(an_int(value, chance) for value in values)) for values in (shape, strides))
    a_list = b"](" + b"".join(number(value) for value in shape) + b"e"
    size = mostly(size, [called(name("torch", "Size"), size), a_list], chance)
    steps = [0, 1, 2, 3, 5, 1 << 40, 1 << 62, -1]
    stride = mostly(stride, [numbers(*(chance.choice(steps) for _ in shape))], chance)
    return an_int(mostly(0, [1, 2, 3, 6, 24, 1 << 61], chance), chance), size, stride


def metadata(chance: random.Random) -> bytes:
    pairs = [b"X\4\0\0\0conj", b"X\3\0\0\0neg", b"X\1\0\0\0x"]
    values = [TRUE, FALSE, NONE, number(1), number(0), text("a"), b"]"]
    return b"}" + b"".join(chance.choice(pairs) + chance.choice(values) + b"s" for _ in range(chance.randrange(3)))


def dtype(chance: random.Random) -> bytes:
    return name("torch", chance.choice(DTYPES))


def flag(chance: random.Random) -> bytes:
    return mostly(chance.choice([*[FALSE] * 7, TRUE]), [NONE, number(0), number(1)], chance)


def hooks(chance: random.Random) -> bytes:
    return mostly(HOOKS, [NONE, b"}", b")", called(name("collections", "OrderedDict"), b"](K\1K\2\x86e")], chance)


def plain(chance: random.Random, held: bytes | None = None) -> bytes:
    """A tensor by the usual functions."""
    held = storage(chance) if held is None else held
    offset, size, stride = geometry(chance)
    roll = chance.random()
    if roll < 0.6:
        return called(
            name("torch._utils", "_rebuild_tensor_v2"),
            held,
            offset,
            size,
            stride,
            flag(chance),
            hooks(chance),
            *([metadata(chance)] if chance.random() < 0.15 else []),
        )
    if roll < 0.7:
        return called(name("torch._utils", "_rebuild_tensor"), held, offset, size, stride)
    if roll < 0.9:
        return called(
            name("torch._utils", "_rebuild_tensor_v3"),
            held,
            offset,
            size,
            stride,
            flag(chance),
            hooks(chance),
            dtype(chance),
            *([metadata(chance)] if chance.random() < 0.2 else []),
        )
    scheme = chance.choice(
        [
            several(
                name("torch", "per_tensor_affine"), b"G" + struct.pack(">d", 0.5), number(chance.choice([0, 3, 300]))
            ),
            several(name("torch", "per_tensor_symmetric"), b"G" + struct.pack(">d", 0.5), number(0)),
            several(name("torch", "per_tensor_affine"), number(1), number(0)),
        ]
    )
    held = storage(
        chance, chance.choice(["QUInt8Storage", "QInt8Storage", "QInt32Storage", "QUInt4x2Storage", "ByteStorage"])
    )
    return called(
        name("torch._utils", "_rebuild_qtensor"), held, offset, size, stride, scheme, flag(chance), hooks(chance)
    )


def rebuilt(chance: random.Random) -> bytes:
    """A tensor that is made of another, or of several, or by a call that torch understands and nobody writes."""
    inner = plain(chance)
    state = chance.choice(
        [
            NONE, b"}", b"}X\1\0\0\0aK\1s", several(b"}", b"}X\1\0\0\0bK\1s"), b"}X\1\0\0\0_K\1s",
            b"}X\4\0\0\0dataNs", several(NONE, b"}X\4\0\0\0data" + plain(chance) + b"s"),
            b"}X\4\0\0\0grad" + plain(chance) + b"s", b"}X\x0d\0\0\0requires_grad\x88s",
            b"}X\x0a\0\0\0_is_buffer\x88s",
        ]
    )  # fmt: skip
    six = several(storage(chance), *geometry(chance), flag(chance), hooks(chance))
    kind = chance.choice(
        [
            ("torch", "Tensor"), ("torch._tensor", "Tensor"), ("torch.nn.parameter", "Parameter"),
            ("torch.nn.parameter", "Buffer"), ("my", "Tensor"), ("builtins", "list"),
        ]
    )  # fmt: skip
    layout = chance.choice(["sparse_coo", "sparse_coo", "sparse_csr", "strided"])
    indices = called(
        name("torch._utils", "_rebuild_tensor_v2"),
        several(text("storage"), name("torch", "LongStorage"), text("4"), text("cpu"), number(6)) + b"Q",
        number(0),
        numbers(1, 3),
        numbers(3, 1),
        FALSE,
        HOOKS,
    )
    values = called(
        name("torch._utils", "_rebuild_tensor_v2"),
        several(text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), number(6)) + b"Q",
        number(chance.choice([0, 1])),
        numbers(3),
        numbers(1),
        FALSE,
        HOOKS,
    )
    sizes = chance.choice([numbers(4), called(name("torch", "Size"), b"](K\4e"), b"](K\4e", numbers(0)])
    return chance.choice(
        [
            called(name("torch._utils", "_rebuild_parameter"), inner, flag(chance), hooks(chance)),
            called(name("torch._utils", "_rebuild_parameter_with_state"), inner, flag(chance), hooks(chance), state),
            called(
                name("torch._tensor", "_rebuild_from_type_v2"),
                name("torch._utils", "_rebuild_tensor_v2"),
                name(*kind),
                six,
                state,
            ),
            called(
                name("torch._utils", "_rebuild_sparse_tensor"),
                name("torch", layout),
                several(indices, values, sizes, *chance.choice([[], [TRUE], [FALSE]])),
            ),
            inner + state + b"b",
            called(name("torch.nn.parameter", "Parameter"), inner, *chance.choice([[], [FALSE], [TRUE]])),
            name("torch.nn.parameter", "Parameter") + several(inner) + b"\x81",
            called(
                name("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
                inner,
                dtype(chance),
                text("cpu"),
                flag(chance),
            ),
            called(
                name("torch._utils", "_rebuild_meta_tensor_no_storage"),
                dtype(chance),
                *geometry(chance)[1:],
                flag(chance),
            ),
            storage(chance),
            array(chance),
            called(
                name("torch._utils", "_rebuild_device_tensor_from_numpy"),
                array(chance),
                dtype(chance),
                text("cpu"),
                flag(chance),
            ),
            called(name("torch", "Size"), chance.choice([numbers(2, 3), b"](K\2e", text("ab"), b"(K\1\x88t", b")"])),
            called(
                name("torch", "device"),
                *chance.choice(
                    [
                        [text("cpu")], [text("cuda"), number(0)], [text("cuda:1")], [text("CPU")], [text("cuda:01")],
                        [number(0)],
                    ]
                ),
            ),
            name(
                "torch",
                chance.choice(["float32", "half", "strided", "preserve_format", "per_channel_affine", "double"]),
            ),
        ]
    )  # fmt: skip


def array(chance: random.Random) -> bytes:
    """An array or scalar of numpy, its state given at once, later or to another reference."""
    code = chance.choice(
        ["f4", "<f4", ">f4", "i8", "f8", "u1", "b1", "c8", "S3", "U1", "M8", "V2", "O8", "=f4", "|u1", "f2"]
    )
    order = chance.choice(["<", ">", "|", "="])
    kind = called(name("numpy", "dtype"), text(code), FALSE, TRUE)
    kind += (
        several(number(3), text(order), NONE, NONE, NONE, number(-1), number(-1), number(0)) + b"b"
        if chance.random() < 0.8
        else b""
    )
    modules = ["numpy.core.multiarray", "numpy._core.multiarray"]
    width = int("".join(filter(str.isdigit, code)))
    data = bytes(range(1, 1 + width * 4))
    if chance.random() < 0.2:
        raw = data[:width]
        return called(name(chance.choice(modules), "scalar"), kind, b"C" + bytes([len(raw)]) + raw)
    made = called(name(chance.choice(modules), "_reconstruct"), name("numpy", "ndarray"), b"K\0\x85", b"C\1b")
    shape = chance.choice([numbers(4), numbers(2, 2), numbers(1, 4)])
    state = several(number(1), shape, kind, chance.choice([*[FALSE] * 7, TRUE]), b"C" + bytes([len(data)]) + data)
    if chance.random() < 0.3:
        # Stored, and given its state by another name.
        return made + b"r\x40\1\0\0" + b"0" + b"j\x40\1\0\0" + state + b"b0" + b"j\x40\1\0\0"
    return made + state + b"b"


def an_entry(at: int, chance: random.Random) -> bytes:
    """A key and a value, each whole by itself."""
    roll = chance.random()
    key = chance.choice(
        [text(f"w{at}")] * 20
        + [
            number(at),
            several(text("a"), number(at)),
            name("torch", "float32"),
            several(text("dtype"), text("float32")),
        ]
    )
    if roll < 0.7:
        return key + plain(chance)
    return key + rebuilt(chance)


def packed(steps: Sequence[bytes]) -> bytes:
    return zipped(members(b"\x80\x02" + b"}(" + b"".join(steps) + b"u.", STORAGES))


def repacked(parts: list[Any], at: int) -> Callable[[Sequence[bytes]], bytes]:
    def build(steps: Sequence[bytes]) -> bytes:
        changed = [*parts]
        changed[at] = changed[at].changed(data=b"".join(steps))
        return zipped(changed)

    return build


def a_tensor_case(chance: random.Random) -> Case:
    roll = chance.random()
    if roll < 0.1:
        return Case([saved(honest_tree(chance), pickle_protocol=chance.choice([2, 2, 3, 4, 5]))], honest=True)
    if roll < 0.55:
        return Case([an_entry(at, chance) for at in range(chance.choice([1, 2, 2, 3]))], packed)
    # As torch writes it, and then not quite.
    parts = members_of(saved(honest_tree(chance), pickle_protocol=chance.choice([2, 2, 4])))
    at = next(index for index, part in enumerate(parts) if str(part.name).endswith("data.pkl"))
    codes = opcodes(parts[at].data)
    for _ in range(chance.choice([1, 1, 2])):
        codes = edited(codes, chance)
    return Case(codes, repacked(parts, at))


def edited(codes: list[bytes], chance: random.Random) -> list[bytes]:
    """One opcode in place of another of its kind, from elsewhere in the pickle."""
    if chance.random() < 0.3:
        return of_opcodes(codes, chance)
    kind = chance.choice([b"c", b"K", b"X", b"q", b"h", b"q", b"r"])
    places = [at for at, code in enumerate(codes) if code[:1] == kind]
    if not places:
        return codes
    at, other = chance.choice(places), codes[chance.choice(places)]
    if kind == b"c" and chance.random() < 0.7:
        other = name("torch", chance.choice(KINDS))
    if kind in b"qr" and chance.random() < 0.5:
        other = b"r" + struct.pack("<I", chance.choice([0, 1, 5, 300, 1000, 70000]))
    return [*codes[:at], other, *codes[at + 1 :]]


def honest_tree(chance: random.Random) -> Any:
    made = torch.Generator().manual_seed(chance.randrange(1 << 30))
    whole = torch.randn(24, generator=made)
    several_of: dict[str, Any] = {
        f"layer.{at}.weight": torch.randn(2, 3, generator=made) for at in range(chance.choice([1, 3, 12]))
    }
    more: list[Any] = [
        {"view": whole[2:8].view(2, 3), "t": whole.view(4, 6).t(), "whole": whole, "again": whole},
        {"one": whole[0], "rows": list(whole.view(4, 6)), "as": whole},
        {"h": whole.half(), "b": whole.bfloat16(), "c": torch.randn(2, dtype=torch.complex64, generator=made).conj()},
        {"p": torch.nn.Parameter(whole), "e": torch.zeros(0, 3), "s": torch.tensor(3)},
        {"q": torch.quantize_per_tensor(whole, 0.1, 0, torch.qint8)},
        {
            "u": torch.arange(4).to(torch.uint16),
            "neg": torch.randn(2, dtype=torch.complex64, generator=made).conj().imag,
        },
        {"n": whole.numpy().copy(), "f": whole.view(4, 6).t().numpy(), "scalar": whole.numpy()[0]},
        {
            "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "size": whole.shape,
            "dtype": whole.dtype,
        },
    ]
    return chance.choice([several_of, {**several_of, **chance.choice(more)}, chance.choice(more), chance.choice(TREES)])
