"""Kernels: every cast is one correct rounding of the stored bits, every other kernel moves bits and changes none."""

from __future__ import annotations

import itertools
import math
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.errors import UsageError
from ckptconv.tensors.computing import Bits, Join
from ckptconv.tensors.dtypes import DTYPES, can_cast
from ckptconv.tensors.kernels import apply, is_zero, pick, scatter
from ckptconv.tensors.moves import Cast, Conjugate, Cut, Gather, Kernel, Negate, Runs, Swap
from ckptconv.tensors.strides import contiguous_strides

WIDE = ("float64", "float32", "float16", "bfloat16")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
# Exponent bits, mantissa bits of the IEEE formats.
BITS = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}

moderately = examples(80)


def run(kernel: Kernel, data: bytes) -> bytes:
    return bytes(apply((kernel,), data)[0])


def cast(source: str, target: str, data: bytes) -> tuple[bytes, int]:
    result, lost = apply((Cast(source, target),), data)
    return bytes(result), lost.infinite


def tensor(dtype: str, data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes()


def words(dtype: str, data: bytes) -> np.ndarray:
    return np.frombuffer(data, f"<u{DTYPES[dtype].itemsize}")


def nan_mask(dtype: str, data: bytes) -> np.ndarray:
    exponent, mantissa = BITS[dtype]
    bits = words(dtype, data)
    infinity = ((1 << exponent) - 1) << mantissa
    return (bits & bits.dtype.type((1 << (exponent + mantissa)) - 1)) > infinity


def assert_same_numbers(target: str, ours: bytes, theirs: bytes) -> None:
    """Bit for bit, minus zero and infinities included, except that one NaN is as good as another."""
    nan = nan_mask(target, ours)
    assert np.array_equal(nan, nan_mask(target, theirs))
    assert np.array_equal(words(target, ours)[~nan], words(target, theirs)[~nan])


# ---------------------------------------------------------------------------------------- an exact referee for casts


def exactly(dtype: str, bits: int) -> Fraction:
    """The finite number that `bits` stand for, by the definition of the format."""
    exponent_bits, mantissa_bits = BITS[dtype]
    mantissa = bits & ((1 << mantissa_bits) - 1)
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent:
        mantissa |= 1 << mantissa_bits
    value = mantissa * Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits)
    return -value if bits >> (exponent_bits + mantissa_bits) else value


def nearest(dtype: str, value: Fraction) -> int:
    """The bits, without sign, of the number nearest to `value` ≥ 0; of two, the one whose last bit is 0.

    Bits order non-negative floating numbers, so it is found by bisection; infinity takes the place of the next
    power of two.
    """
    exponent_bits, mantissa_bits = BITS[dtype]
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    low, high = 0, infinity
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exactly(dtype, middle) <= value else (low, middle)
    below, above = value - exactly(dtype, low), exactly(dtype, high) - value
    if below == above:
        return low if low % 2 == 0 else high
    return low if below < above else high


def test_the_referee_agrees_with_struct_on_halves() -> None:
    for bits in range(0, 0x7C00, 37):
        assert struct.unpack("<e", struct.pack("<H", bits))[0] == exactly("float16", bits)
        assert nearest("float16", exactly("float16", bits)) == bits


@st.composite
def near_ties(draw: st.DrawFn, source: str, target: str) -> bytes:
    """A number of dtype `source` at, or a few steps beside, the middle of two numbers of dtype `target`."""
    exponent_bits, mantissa_bits = BITS[target]
    bits = draw(st.integers(0, (((1 << exponent_bits) - 1) << mantissa_bits) - 1))
    middle = (exactly(target, bits) + exactly(target, bits + 1)) / 2
    at = nearest(source, middle) + draw(st.integers(-2, 2))
    size = DTYPES[source].itemsize
    sign = draw(st.booleans()) << (8 * size - 1)
    return (max(at, 0) | sign).to_bytes(size, "little")


NARROWING = [
    ("float64", "float32"),
    ("float64", "float16"),
    ("float64", "bfloat16"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("bfloat16", "float16"),
    ("float16", "bfloat16"),
]


@pytest.mark.parametrize(("source", "target"), NARROWING)
@examples(50)
@given(data=st.data())
def test_narrowing_is_one_rounding_to_nearest_even(source: str, target: str, data: st.DataObject) -> None:
    size = DTYPES[source].itemsize
    exponent_bits, mantissa_bits = BITS[source]
    anything = st.binary(min_size=size, max_size=size)
    element = data.draw(st.one_of(near_ties(source, target), near_ties(source, "float32"), anything))
    bits = int.from_bytes(element, "little")
    magnitude = bits & ((1 << (8 * size - 1)) - 1)
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    result, overflows = cast(source, target, element)
    found = int.from_bytes(result, "little")
    sign = 8 * DTYPES[target].itemsize - 1
    if magnitude > infinity:
        assert nan_mask(target, result).all()
        return
    target_infinity = ((1 << BITS[target][0]) - 1) << BITS[target][1]
    expected = target_infinity if magnitude == infinity else nearest(target, exactly(source, magnitude))
    assert found == expected | (bits >> (8 * size - 1)) << sign
    assert overflows == (magnitude != infinity and expected == target_infinity)


def test_float64_to_bfloat16_does_not_round_twice() -> None:
    # Just above the middle of two bfloat16: float32 would round it to the middle, and that down to the even one.
    value = 1.0 + 2.0**-8 + 2.0**-40
    assert tensor("bfloat16", cast("float64", "bfloat16", struct.pack("<d", value))[0]).item() == 1.0 + 2.0**-7


@moderately
@given(st.lists(st.floats(width=64, allow_nan=False), min_size=1, max_size=50))
def test_float64_to_float16_as_struct_packs_it(values: list[float]) -> None:
    def packed(value: float) -> bytes:
        try:
            return struct.pack("<e", value)
        except OverflowError:
            return struct.pack("<e", math.copysign(math.inf, value))

    assert cast("float64", "float16", struct.pack(f"<{len(values)}d", *values))[0] == b"".join(map(packed, values))


# ------------------------------------------------------------------------------------------------ casts beside torch


@pytest.mark.parametrize("target", WIDE)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_all_sixteen_bit_numbers(source: str, target: str) -> None:
    data = np.arange(1 << 16, dtype="<u2").tobytes()
    assert_same_numbers(target, cast(source, target, data)[0], raw(tensor(source, data).to(getattr(torch, target))))


@pytest.mark.parametrize("target", WIDE)
@pytest.mark.parametrize("source", EIGHT_BITS)
def test_all_eight_bit_numbers(source: str, target: str) -> None:
    data = bytes(range(256))
    theirs = tensor(source, data).to(torch.float32).to(getattr(torch, target))
    assert_same_numbers(target, cast(source, target, data)[0], raw(theirs))


@pytest.mark.parametrize(("source", "target"), [pair for pair in NARROWING if pair[0] != "float64"])
@moderately
@given(data=st.binary(min_size=4, max_size=400))
def test_narrowing_as_torch_does(source: str, target: str, data: bytes) -> None:
    data = data[: len(data) // 4 * 4]
    theirs = tensor(source, data).to(getattr(torch, target))
    assert_same_numbers(target, cast(source, target, data)[0], raw(theirs))


@pytest.mark.parametrize(("source", "target"), [("float64", "float32"), ("float32", "float64")])
@moderately
@given(data=st.binary(min_size=8, max_size=400))
def test_between_float64_and_float32_as_torch_does(source: str, target: str, data: bytes) -> None:
    data = data[: len(data) // 8 * 8]
    theirs = tensor(source, data).to(getattr(torch, target))
    assert_same_numbers(target, cast(source, target, data)[0], raw(theirs))


@pytest.mark.parametrize("elements", [0, 1, 65535, 65536, 65537, 200_003])
@pytest.mark.parametrize(
    ("source", "target"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float64")]
)
def test_any_number_of_elements(source: str, target: str, elements: int) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(getattr(torch, source))
    assert cast(source, target, raw(values))[0] == raw(values.to(getattr(torch, target)))


def test_float32_to_bfloat16_on_a_dense_sample_of_all_bits() -> None:
    # Every upper half, each with the lower halves around which rounding turns.
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], "<u4")
    data = ((np.arange(1 << 16, dtype="<u4") << 16)[:, None] | lower).tobytes()
    ours, overflows = cast("float32", "bfloat16", data)
    values = tensor("float32", data)
    assert_same_numbers("bfloat16", ours, raw(values.to(torch.bfloat16)))
    assert overflows == int((values.isfinite() & tensor("bfloat16", ours).isinf()).sum()) > 0


@pytest.mark.parametrize("name", WIDE)
def test_a_cast_to_the_same_dtype_changes_no_bit(name: str) -> None:
    data = bytes(range(256)) * 8
    assert cast(name, name, data) == (data, 0)


# ------------------------------------------------------------------------------------------------- NaN and overflows


PAIRS = [(a, b) for a, b in itertools.product(WIDE, WIDE) if a != b]


@pytest.mark.parametrize(("source", "target"), PAIRS)
@moderately
@given(data=st.data())
def test_nan_keeps_its_sign_and_the_leading_bits_of_its_payload_and_is_quiet(
    source: str, target: str, data: st.DataObject
) -> None:
    exponent, mantissa = BITS[source]
    sign, payload = data.draw(st.booleans()), data.draw(st.integers(1, (1 << mantissa) - 1))
    bits = (sign << exponent | ((1 << exponent) - 1)) << mantissa | payload
    found = int.from_bytes(cast(source, target, bits.to_bytes(DTYPES[source].itemsize, "little"))[0], "little")
    exponent, wanted = BITS[target]
    payload = payload << (wanted - mantissa) if wanted > mantissa else payload >> (mantissa - wanted)
    if (source, target) != ("bfloat16", "float32"):  # which keeps all bits as they are
        payload |= 1 << (wanted - 1)
    assert found == (sign << exponent | ((1 << exponent) - 1)) << wanted | payload


@pytest.mark.parametrize("target", WIDE)
@pytest.mark.parametrize("source", EIGHT_BITS)
def test_an_eight_bit_nan_becomes_a_quiet_one(source: str, target: str) -> None:
    data = bytes(range(256))
    result = cast(source, target, data)[0]
    nan = torch.isnan(tensor(source, data).float()).numpy()
    assert nan.any()
    quiet = 1 << (BITS[target][1] - 1)
    assert (words(target, result)[nan] & quiet).all()


@pytest.mark.parametrize("source", ["float64", "float32", "bfloat16"])
def test_finite_numbers_that_become_infinite_are_counted_and_others_not(source: str) -> None:
    dtype = getattr(torch, source)
    fine = torch.tensor([65504.0, -65504.0, 0.0, math.inf, -math.inf, math.nan], dtype=dtype)
    fine = fine if source != "bfloat16" else fine[2:]
    beyond = torch.tensor([65536.0, -65536.0, torch.finfo(dtype).max], dtype=dtype)
    assert cast(source, "float16", raw(fine))[1] == 0
    result, overflows = cast(source, "float16", raw(torch.cat([fine, beyond])))
    assert overflows == 3
    assert tensor("float16", result)[-3:].tolist() == [math.inf, -math.inf, math.inf]


@pytest.mark.parametrize(
    ("source", "target", "largest"),
    [
        ("float32", "float16", 65519.99609375),  # below the middle of 65504 and 65536
        ("float64", "float16", math.nextafter(65520.0, 0.0)),
        ("float64", "float32", math.nextafter((2 - 2.0**-24) * 2.0**127, 0.0)),
        ("float64", "bfloat16", math.nextafter((2 - 2.0**-8) * 2.0**127, 0.0)),
    ],
)
def test_the_boundary_of_overflow(source: str, target: str, largest: float) -> None:
    code, step = ("<f", 1) if source == "float32" else ("<d", 1)
    within = struct.pack(code, largest)
    beyond = (int.from_bytes(within, "little") + step).to_bytes(len(within), "little")
    assert cast(source, target, within * 3)[1] == 0
    assert tensor(target, cast(source, target, within)[0]).isfinite().all()
    assert cast(source, target, within + beyond)[1] == 1
    assert tensor(target, cast(source, target, beyond)[0]).isinf().all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_overflow_is_found_among_numbers_of_the_other_sign(sign: float) -> None:
    result, overflows = cast("float32", "float16", raw(sign * torch.tensor([-1.0, -2.0, 1e30, -3.0])))
    assert overflows == 1
    assert tensor("float16", result)[2].item() == sign * math.inf


@pytest.mark.parametrize("source", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32"])
@given(st.lists(st.floats(allow_nan=True, width=64) | st.floats(-1e-300, 1e-300), min_size=1))
def test_numbers_that_become_zero_are_counted_and_zeros_not(source: str, target: str, values: list[float]) -> None:
    numbers = [*values, 0.0, -0.0, 1e-8, -1e-41, math.inf, math.nan]
    before = torch.tensor(numbers, dtype=torch.float64).to(getattr(torch, source))
    result, lost = apply((Cast(source, target),), raw(before))
    after = tensor(target, bytes(result))
    assert lost.zero == int(((after == 0) & (before != 0)).sum())


def test_scales_that_become_zero_are_counted() -> None:
    # The smallest float16 is 2**-24, and 2**-25 rounds to zero, the even one.
    assert apply((Cast("float8_e8m0fnu", "float16"),), bytes(range(256)))[1].zero == 127 - 24


def test_overflows_of_all_blocks_are_added_up() -> None:
    data = torch.zeros(200_000, dtype=torch.float32)
    data[::1000] = 1e30
    assert cast("float32", "float16", raw(data))[1] == 200


def test_scales_beyond_float16_overflow() -> None:
    # float8_e8m0fnu holds 2**(bits - 127): float16 ends below 2**16, and 255 is NaN.
    assert cast("float8_e8m0fnu", "float16", bytes(range(256)))[1] == 255 - (127 + 16)


# --------------------------------------------------------------------------------------------- what is supported


def test_supported_casts_are_those_between_floating_dtypes() -> None:
    floats = {*WIDE, *EIGHT_BITS}
    for source, target in itertools.product(DTYPES, DTYPES):
        expected = source == target or (source in floats and target in WIDE)
        assert can_cast(source, target) == expected
        if expected and source != target:
            assert len(cast(source, target, bytes(DTYPES[source].itemsize))[0]) == DTYPES[target].itemsize


@pytest.mark.parametrize(
    "kernel",
    [Cast("float32", "float8_e4m3fn"), Cast("int64", "float32"), Cast("complex64", "float32"), Negate("bool")],
)
def test_an_unsupported_kernel_is_a_usage_error(kernel: Kernel) -> None:
    with pytest.raises(UsageError):
        apply((kernel,), bytes(16))


@pytest.mark.parametrize(
    "kernel", [Cast("float32", "float16"), Swap(4), Negate("int64"), Conjugate("complex64"), Cut(0, 8), Cut(3, 2)]
)
def test_data_that_does_not_fit_is_refused(kernel: Kernel) -> None:
    with pytest.raises(ValueError, match=type(kernel).__name__):
        apply((kernel,), bytes(7))


# -------------------------------------------------------------------------------------------------- gathers and swaps


def gathered(kernel: Gather, data: bytes) -> bytes:
    """Element by element."""
    offsets = (
        sum(index * stride for index, stride in zip(indices, kernel.strides, strict=True))
        for indices in itertools.product(*map(range, kernel.shape))
    )
    return b"".join(data[offset : offset + kernel.itemsize] for offset in offsets)


@st.composite
def gathers(draw: st.DrawFn) -> Gather:
    """A permuted tensor, some of whose dimensions are stepped over, repeated, or empty."""
    item = draw(st.sampled_from([1, 2, 4, 8, 16, 3]))
    extents = draw(st.lists(st.integers(1, 6), min_size=0, max_size=4))
    order = draw(st.permutations(range(len(extents))))
    strides = contiguous_strides([extents[axis] for axis in order])
    shape, steps = [0] * len(extents), [0] * len(extents)
    for axis, stride in zip(order, strides, strict=True):
        step = draw(st.sampled_from([1, 1, 1, 2]))
        repeated = draw(st.sampled_from([False, False, False, True]))
        shape[axis] = draw(st.sampled_from([-(-extents[axis] // step)] * 9 + [0]))
        steps[axis] = 0 if repeated else stride * step * item
    return Gather(tuple(shape), tuple(steps), item)


@moderately
@given(kernel=gathers(), seed=st.integers(0, 1 << 32))
def test_gather_picks_by_strides(kernel: Gather, seed: int) -> None:
    last = sum((n - 1) * stride for n, stride in zip(kernel.shape, kernel.strides, strict=True))
    data = random.Random(seed).randbytes(max(last, 0) + kernel.itemsize)
    assert run(kernel, data) == gathered(kernel, data)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((513, 130), (1, 0)),
        ((64, 1025), (1, 0)),
        # Rows that share few lines of a cache, more than one tile of them.
        ((600, 512), (1, 0)),
        ((31, 700), (1, 0)),
        ((700, 9), (1, 0)),
        ((700, 32), (1, 0)),
        ((5, 70, 40), (0, 2, 1)),
        ((40, 3, 70), (2, 1, 0)),
        ((7, 3, 3, 64), (0, 3, 1, 2)),
        ((3, 40, 2, 50), (2, 3, 0, 1)),
    ],
)
def test_gather_transposes_as_torch_does(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> None:
    numel = math.prod(shape)
    values = torch.arange(numel * dtype.itemsize, dtype=torch.int64).to(torch.uint8).view(dtype).reshape(shape)
    turned = values.permute(order)
    item = dtype.itemsize
    kernel = Gather(tuple(turned.shape), tuple(stride * item for stride in turned.stride()), item)
    assert run(kernel, raw(values.reshape(-1))) == raw(turned.reshape(-1))


@pytest.mark.parametrize("kernel", [Gather((3, 2), (4, 8), 4), Gather((2,), (8,), 8), Gather((2,), (-4,), 4)])
def test_gather_does_not_leave_its_data(kernel: Gather) -> None:
    with pytest.raises(ValueError, match="leaves its 12 bytes"):
        apply((kernel,), bytes(12))


@moderately
@given(item=st.sampled_from([1, 2, 4, 8]), data=st.binary(max_size=200))
def test_swap_reverses_every_unit(item: int, data: bytes) -> None:
    data = data[: len(data) // item * item]
    assert run(Swap(item), data) == b"".join(data[at : at + item][::-1] for at in range(0, len(data), item))


# -------------------------------------------------------------------------------------------------------------- signs


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"])
@moderately
@given(data=st.binary(min_size=16, max_size=160))
def test_negation_of_numbers_flips_signs_and_nothing_else(name: str, data: bytes) -> None:
    data = data[: len(data) // 16 * 16]
    size = DTYPES[name].itemsize // (2 if DTYPES[name].kind == "c" else 1)
    ours = run(Negate(name), data)
    assert bytes(a ^ b for a, b in zip(data, ours, strict=True)) == (bytes(size - 1) + b"\x80") * (len(data) // size)
    values = tensor(name, data)
    assert torch.equal(torch.nan_to_num(tensor(name, ours)), torch.nan_to_num(-values))


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8"])
@moderately
@given(data=st.binary(min_size=8, max_size=80))
def test_negation_of_integers_as_torch_does(name: str, data: bytes) -> None:
    data = data[: len(data) // 8 * 8]
    assert run(Negate(name), data) == raw(-tensor(name, data))


@pytest.mark.parametrize("name", EIGHT_BITS[:4])
def test_negation_of_eight_bit_numbers(name: str) -> None:
    data = bytes(range(256))
    before, after = tensor(name, data).float(), tensor(name, run(Negate(name), data)).float()
    assert torch.equal(torch.isnan(before), torch.isnan(after))
    assert torch.equal(torch.nan_to_num(after), torch.nan_to_num(-before))


@pytest.mark.parametrize(("name", "part"), [("complex32", "<e"), ("complex64", "<f"), ("complex128", "<d")])
@moderately
@given(data=st.binary(min_size=16, max_size=160))
def test_conjugation_flips_the_sign_of_imaginary_parts(name: str, part: str, data: bytes) -> None:
    data = data[: len(data) // 16 * 16]
    size = struct.calcsize(part)
    ours = run(Conjugate(name), data)
    assert bytes(a ^ b for a, b in zip(data, ours, strict=True)) == (bytes(2 * size - 1) + b"\x80") * (
        len(data) // size // 2
    )


def test_negation_and_conjugation_resolve_the_bits_torch_sets() -> None:
    values = torch.randn(20, dtype=torch.complex64)
    assert run(Conjugate("complex64"), raw(values)) == raw(values.conj().resolve_conj())
    imaginary = values.conj().imag
    assert imaginary.is_neg()
    stored = values.imag.contiguous()
    assert run(Negate("float32"), raw(stored)) == raw(imaginary.resolve_neg())


def test_a_real_tensor_is_its_own_conjugate() -> None:
    assert run(Conjugate("float32"), bytes(range(16))) == bytes(range(16))


# ------------------------------------------------------------------------------------------------ chains and targets


def test_kernels_are_applied_in_turn() -> None:
    values = torch.randn(6, 5, dtype=torch.float64)
    big_endian = raw(values.reshape(-1).view(torch.uint8).reshape(-1, 8).flip(1).reshape(-1))
    kernels = (Gather((5, 6), (8, 40), 8), Swap(8), Cast("float64", "float32"), Negate("float32"), Cut(4, 44))
    assert bytes(apply(kernels, big_endian)[0]) == raw(-values.T.float().contiguous().reshape(-1))[4:44]


CHAINS: list[tuple[Kernel, ...]] = [
    (),
    (Cut(8, 24),),
    (Swap(4),),
    (Cast("float32", "bfloat16"),),
    (Gather((4, 2), (4, 16), 4), Negate("float32")),
    (Swap(4), Cut(4, 12)),
    (Cut(4, 12), Swap(4)),
]


@pytest.mark.parametrize("kernels", CHAINS)
def test_the_result_can_be_written_in_place(kernels: tuple[Kernel, ...]) -> None:
    data = bytes(range(32))
    expected = bytes(apply(kernels, data)[0])
    room = bytearray(b"?" * (len(expected) + 7))
    out = memoryview(room)[3 : 3 + len(expected)]
    result, _ = apply(kernels, data, out)
    assert result is out
    assert bytes(room) == b"???" + expected + b"????"


@pytest.mark.parametrize("kernels", CHAINS)
@pytest.mark.parametrize("change", [-1, 1])
def test_room_of_another_size_is_refused(kernels: tuple[Kernel, ...], change: int) -> None:
    data = bytes(range(32))
    size = len(apply(kernels, data)[0]) + change
    with pytest.raises(ValueError, match="the buffer holds"):
        apply(kernels, data, memoryview(bytearray(size)))


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: memoryview(b"x" + data)[1:]])
def test_any_buffer_will_do_at_any_address(wrap: Callable[[bytes], bytes]) -> None:
    values = torch.randn(1000)
    assert cast("float32", "bfloat16", wrap(raw(values)))[0] == raw(values.bfloat16())


def test_data_is_left_alone() -> None:
    data = bytearray(range(64))
    for kernel in (Negate("float32"), Conjugate("complex64"), Swap(8), Cast("float64", "bfloat16")):
        apply((kernel,), data)
        assert data == bytearray(range(64))


@st.composite
def scattered_runs(draw: st.DrawFn) -> Runs:
    length = draw(st.integers(1, 12))
    grid, extent = [], length
    for _ in range(draw(st.integers(0, 3))):
        count, distance = draw(st.integers(1, 5)), extent + draw(st.integers(0, 5))
        grid.append((count, distance))
        extent = (count - 1) * distance + extent
    return Runs(draw(st.integers(0, 5)), length, tuple(reversed(grid)))


@moderately
@given(target=scattered_runs(), spare=st.integers(0, 5))
def test_scatter_puts_every_run_in_its_place(target: Runs, spare: int) -> None:
    data = bytes(index % 255 for index in range(target.nbytes))
    starts = list(target.offsets())
    expected = bytearray(b"\xff" * (starts[-1] + target.length + spare))
    for index, at in enumerate(starts):
        expected[at : at + target.length] = data[index * target.length : (index + 1) * target.length]
    out = bytearray(b"\xff" * len(expected))
    scatter(memoryview(out), target, data)
    assert out == expected


@pytest.mark.parametrize(
    ("target", "size"),
    [
        (Runs(0, 4), 5),
        (Runs(90, 16), 16),
        (Runs(-1, 4), 4),
        (Runs(0, 4, ((30, 4),)), 120),
        (Runs(50, 4, ((2, -4),)), 8),
        (Runs(0, 1, ((20, 6),)), 20),
    ],
)
def test_scatter_stays_inside(target: Runs, size: int) -> None:
    out = bytearray(100)
    with pytest.raises(ValueError, match="bytes for"):
        scatter(memoryview(out), target, b"x" * size)
    assert out == bytearray(100)


# ------------------------------------------------------------------------------------------------------ heavy imports


def test_numpy_waits_for_the_first_kernel_and_starts_no_threads() -> None:
    program = """
import os, sys
os.environ.pop("OPENBLAS_NUM_THREADS", None)
from ckptconv.tensors import kernels, moves
assert bytes(kernels.apply((moves.Cut(1, 3),), b"abcd")[0]) == b"bc"
kernels.scatter(memoryview(bytearray(9)), moves.Runs(1, 2, ((2, 4),)), b"abcd")
assert "numpy" not in sys.modules
kernels.apply((moves.Swap(2),), b"abcd")
assert "numpy" in sys.modules and "torch" not in sys.modules
assert "OPENBLAS_NUM_THREADS" not in os.environ
assert not os.path.exists("/proc/self/task") or len(os.listdir("/proc/self/task")) == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# ------------------------------------------------------------------------------------------------- runs and bits


@moderately
@given(
    st.integers(0, 20),
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=2),
    st.booleans(),
)
def test_runs_are_picked_as_they_are_named_and_scattered_back(
    offset: int, length: int, spaced: list[tuple[int, int]], given_room: bool
) -> None:
    grid: list[tuple[int, int]] = []
    extent = length
    for count, gap in spaced:  # innermost first, so that no run overlaps another
        grid.insert(0, (count, extent + gap))
        extent += (count - 1) * (extent + gap)
    runs = Runs(offset, length, tuple(grid))
    data = np.random.default_rng(0).integers(0, 256, runs.stop + 5, dtype="u1").tobytes()
    expected = b"".join(data[at : at + length] for at in runs.offsets())
    room = memoryview(bytearray(runs.nbytes)) if given_room else None
    assert bytes(pick(memoryview(data), runs, room)) == expected
    back = memoryview(bytearray(len(data)))
    scatter(back, runs, expected)
    assert b"".join(bytes(back[at : at + length]) for at in runs.offsets()) == expected
    with pytest.raises(ValueError, match="bytes"):
        pick(memoryview(data)[: runs.stop - 1], runs)


def test_zero_is_zero_in_every_byte() -> None:
    assert is_zero(memoryview(bytes(1000)))
    assert is_zero(memoryview(b""))
    assert not any(is_zero(memoryview(bytes(at) + b"\x80" + bytes(99 - at))) for at in range(100))


@moderately
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1), st.booleans()), max_size=50))
def test_bits_are_taken_out_of_numbers_and_put_into_them_again(rows: list[tuple[int, int, bool]]) -> None:
    whole = struct.pack(f"<{len(rows)}Q", *(low | high << 32 | top << 63 for low, high, top in rows))
    parts = [
        (Bits(8, 0, 32, 4), struct.pack(f"<{len(rows)}I", *(low for low, _, _ in rows))),
        (Bits(8, 32, 31, 4), struct.pack(f"<{len(rows)}I", *(high for _, high, _ in rows))),
        (Bits(8, 63, 1, 1), bytes(top for _, _, top in rows)),
    ]
    assert [run(kernel, whole) for kernel, _ in parts] == [expected for _, expected in parts]
    join = Join(((4, 0, 32), (4, 32, 31), (1, 63, 1)), 8)
    assert run(join, b"".join(part for _, part in parts)) == whole


@pytest.mark.parametrize(("count", "flag", "said"), [(1 << 31, 1, "2147483648"), (5, 2, "1 bits")])
def test_numbers_that_do_not_fit_where_they_are_put_are_refused(count: int, flag: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(Join(((4, 0, 31), (1, 31, 1)), 4), struct.pack("<IB", count, flag))
