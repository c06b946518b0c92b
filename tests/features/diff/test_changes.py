"""What differs between two runs of elements: counts, places and sizes, beside a reference that goes one by one."""

from __future__ import annotations

import cmath
import itertools
import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.features.diff import changes
from ckptconv.features.diff.changes import Measured, Tolerance, compared, squares_of, widened
from ckptconv.features.reporting.statistics import root
from ckptconv.tensors.dtypes import DTYPES

NUMBERS = [name for name in DTYPES if widened(DTYPES[name], DTYPES[name])]


def values_of(dtype: str, data: bytes) -> list[Any]:
    """The elements as numbers of Python, read by torch."""
    if dtype == "bool":
        return [int(byte != 0) for byte in data]
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype))
    if DTYPES[dtype].kind in "iu":
        return tensor.tolist()
    return tensor.to(torch.complex128 if DTYPES[dtype].kind == "c" else torch.float64).tolist()


def same_number(a: Any, b: Any) -> bool:
    """Equal, or NaN in the same halves."""
    pairs = [(a.real, b.real), (a.imag, b.imag)]
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in pairs)


def reference(one: tuple[str, bytes], other: tuple[str, bytes], tolerance: Tolerance | None) -> dict[str, Any]:
    """What differs, element by element."""
    a, b = values_of(*one), values_of(*other)
    item = DTYPES[one[0]].itemsize
    finite = [cmath.isfinite(x) and cmath.isfinite(y) for x, y in zip(a, b, strict=True)]
    sizes = [max(abs(x), abs(y)) if ok else 0 for x, y, ok in zip(a, b, finite, strict=True)]
    distances = [abs(y - x) if ok else 0 for x, y, ok in zip(a, b, finite, strict=True)]
    equal = [same_number(x, y) for x, y in zip(a, b, strict=True)]
    differ = [not each for each in equal]
    if tolerance:
        allowed = [max(tolerance.rtol * size, tolerance.atol) for size in sizes]
        near = [ok and d <= most for ok, d, most in zip(finite, distances, allowed, strict=True)]
        differ = [not (e or n) for e, n in zip(equal, near, strict=True)]
    elif one[0] == other[0]:
        differ = [one[1][n * item :][:item] != other[1][n * item :][:item] for n in range(len(a))]
    return {
        "elements": sum(differ),
        "first": differ.index(True) if any(differ) else None,
        "same_value": sum(d and e for d, e in zip(differ, equal, strict=True)),
        "not_finite": sum(d and not f for d, f in zip(differ, finite, strict=True)),
        "max_abs": max(distances),
        "max_rel": max(d / s if s else 0 for d, s in zip(distances, sizes, strict=True)),
        "norms": [
            math.hypot(*distances),
            math.hypot(*(abs(x) for x, ok in zip(a, finite, strict=True) if ok)),
            math.hypot(*(abs(y) for y, ok in zip(b, finite, strict=True) if ok)),
        ],
    }


@st.composite
def two_runs(draw: st.DrawFn, dtypes: tuple[str, str]) -> tuple[bytes, bytes]:
    """As many elements of both dtypes, some of them alike."""
    count = draw(st.integers(1, 12))
    one, other = (draw(st.binary(min_size=count * i, max_size=count * i)) for i in (DTYPES[d].itemsize for d in dtypes))
    if dtypes[0] == dtypes[1]:
        at = draw(st.integers(0, count)) * DTYPES[dtypes[0]].itemsize
        other = one[:at] + other[at:]
    return one, other


def check(found: Measured, expected: dict[str, Any]) -> None:
    for name in ("elements", "first", "same_value", "not_finite"):
        assert getattr(found, name) == expected[name], name
    assert math.isclose(found.max_abs, expected["max_abs"], rel_tol=1e-12)
    assert math.isclose(found.max_rel, expected["max_rel"], rel_tol=1e-9, abs_tol=1e-300)
    for norm, told in zip(map(root, found.squares), expected["norms"], strict=True):
        assert math.isclose(norm, told, rel_tol=1e-9, abs_tol=1e-300)


PAIRS = [(name, name) for name in NUMBERS if name not in ("float64", "complex128")]
PAIRS += [(one, other) for one in NUMBERS for other in NUMBERS if one < other and widened(DTYPES[one], DTYPES[other])]


@examples(80)
@given(st.data())
def test_what_is_found_is_what_the_reference_finds(data: st.DataObject) -> None:
    dtypes = data.draw(st.sampled_from(PAIRS))
    one, other = data.draw(two_runs(dtypes))
    near = st.builds(Tolerance, st.sampled_from([0.0, 1e-3, 0.5, 3.0]), st.sampled_from([0.0, 1e-3, 100.0]))
    tolerance = data.draw(st.none() | near)
    usual, changes.BLOCK = changes.BLOCK, data.draw(st.sampled_from([1, 3, 100]))
    try:
        kinds = (DTYPES[dtypes[0]], DTYPES[dtypes[1]])
        found = compared(memoryview(one), memoryview(other), kinds, tolerance)
    finally:
        changes.BLOCK = usual
    expected = reference((dtypes[0], one), (dtypes[1], other), tolerance)
    if max(map(abs, expected["norms"])) < 1e300 and expected["max_abs"] < 1e300:
        check(found, expected)


def test_what_cannot_be_widened_without_rounding_is_not_compared() -> None:
    for one, other in (
        ("int64", "float32"),
        ("uint64", "float64"),
        ("int64", "uint64"),
        ("complex64", "float32"),
        ("quint8", "uint8"),
        ("bits8", "bits8"),
    ):
        assert widened(DTYPES[one], DTYPES[other]) == ""
    with pytest.raises(ValueError, match="not comparable"):
        compared(memoryview(bytes(8)), memoryview(bytes(4)), (DTYPES["int64"], DTYPES["float32"]))


def test_elements_that_are_no_numbers_are_counted() -> None:
    found = compared(memoryview(b"\0\1\2"), memoryview(b"\0\5\3"), (DTYPES["quint8"], DTYPES["quint8"]))
    assert (found.elements, found.first, found.change([1], ("", ""), numbers=False).norm) == (2, 1, None)


def test_integers_differ_by_exactly_so_much() -> None:
    least, most = (-(1 << 63)).to_bytes(8, "little", signed=True), ((1 << 63) - 1).to_bytes(8, "little")
    found = compared(memoryview(least), memoryview(most), (DTYPES["int64"], DTYPES["int64"]))
    assert found.max_abs == (1 << 64) - 1


def test_numbers_at_the_ends_of_what_there_is() -> None:
    double = DTYPES["float64"], DTYPES["float64"]
    largest = torch.tensor([1.7e308, 5e-324], dtype=torch.float64)
    one, other = (memoryview((sign * largest).numpy().tobytes()) for sign in (1, -1))
    found = compared(one, other, double)
    change = found.change([0], ("", ""), numbers=True)
    assert change.max_rel == 2
    assert all(math.isfinite(each) for each in (change.max_abs or 0, change.norm or 0, change.relative or 0))
    assert root(squares_of(one, double[0])) == 1.7e308
    tiny = [memoryview(torch.tensor([each, 0.0], dtype=torch.float64).numpy().tobytes()) for each in (1e-310, 2e-310)]
    assert compared(tiny[0], tiny[1], double).max_rel == 0.5


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().tobytes())


def found_in(a: torch.Tensor, b: torch.Tensor) -> Measured:
    """What differs between two tensors of one dtype."""
    dtype = DTYPES[str(a.dtype).removeprefix("torch.")]
    return compared(bytes_of(a), bytes_of(b), (dtype, dtype))


def test_sums_of_squares_are_exact_but_for_one_rounding_after_another() -> None:
    # Tiny numbers, those up to 2, and any, also what is not finite.
    for name, bits in itertools.product(("bfloat16", "float16", "float32"), (0x0FFF, 0x3FFF, 0xFFFF)):
        dice, dtype = random.Random(3), DTYPES[name]
        for count in (1, 2, 700, 5_000):
            words = [dice.randrange(bits + 1) << 8 * (dtype.itemsize - 2) | dice.randrange(2) for _ in range(count)]
            data = memoryview(b"".join(word.to_bytes(dtype.itemsize, "little") for word in words))
            values = torch.frombuffer(bytearray(data), dtype=getattr(torch, name)).double().tolist()
            exact = sum((Fraction(value) ** 2 for value in values if math.isfinite(value)), Fraction(0))
            assert abs(squares_of(data, dtype) - exact) <= exact / 2**44, (name, bits, count)


def test_of_numbers_that_differ_nearly_alike_the_largest_difference_is_found() -> None:
    """In float32 many of these differences and shares are the same."""
    for factor, share in itertools.product((-(1 + 2**-22), 1.4), (1, 50)):
        dice = random.Random(5)
        a = torch.tensor([dice.uniform(1, 2) for _ in range(4_000)])
        b = torch.where(torch.arange(len(a)) % share == 0, a * factor, a)
        found = found_in(a, b)
        pairs = [(Fraction(x), Fraction(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        assert found.max_abs == max(abs(y - x) for x, y in pairs), (factor, share)
        assert found.max_rel == max(float(abs(y - x) / max(abs(x), abs(y))) for x, y in pairs), (factor, share)
        assert found.elements == sum(x != y for x, y in pairs), (factor, share)


def test_of_short_numbers_the_largest_share_is_found_to_the_last_bit() -> None:
    for name in ("bfloat16", "float16", "float8_e4m3fn"):
        dtype, drawn = getattr(torch, name), torch.Generator().manual_seed(3)
        for _ in range(20):
            a = torch.randn(500, generator=drawn).to(dtype)
            b = (a.double() * (1 + torch.rand(500, generator=drawn).double() / 3)).to(dtype)
            found, x, y = found_in(a, b), a.double(), b.double()
            share = (y - x).abs() / torch.maximum(x.abs(), y.abs())
            assert found.max_rel == float(share.nan_to_num().max()), name
            assert found.max_abs == float((y - x).abs().max()), name


def _changed(a: torch.Tensor, case: str, drawn: torch.Generator) -> torch.Tensor:
    """Numbers to compare `a` with."""
    dice = torch.rand(len(a), generator=drawn, dtype=torch.float64)
    factors = {
        "positive": 1 + dice / 3,
        "few change sign": torch.where(dice < 0.01, dice * 50 - 1.2, 1.1),
        "many change sign": 3 * dice - 2,
        "many change sign, none nearly to its opposite": torch.where(dice < 0.5, dice - 0.6, 1 + dice),
    }
    return (a.double() * factors[case]).to(a.dtype)


def test_sizes_are_found_whatever_changes_sign_or_is_zero() -> None:
    cases = ("positive", "few change sign", "many change sign", "many change sign, none nearly to its opposite")
    sizes = ((4_001, 0, 1), (4_001, 5, 1), (4_000, 1, 1), (2, 0, 1), (4_000, 0, 51))
    for name, case in itertools.product(("bfloat16", "float16", "float32", "float64"), cases):
        drawn = torch.Generator().manual_seed(7)
        for count, zeros, every in sizes:
            a = torch.randn(count, generator=drawn).to(getattr(torch, name))
            b = torch.where(torch.arange(count) % every == 0, _changed(a, case, drawn), a)
            if zeros:
                a[::zeros] = 0
                b[:: 3 * zeros] = -0.0
            found, x, y = found_in(a, b), a.double(), b.double()
            distance = (y - x).abs()
            tried = (name, case, count, zeros, every)
            assert found.max_abs == float(distance.max()), tried
            largest = (distance / torch.maximum(x.abs(), y.abs())).nan_to_num(0.0).max()
            assert found.max_rel == float(largest), tried
            one, other = bytes_of(a), bytes_of(b)
            item = DTYPES[name].itemsize
            differ = [one[n * item :][:item] != other[n * item :][:item] for n in range(count)]
            assert (found.elements, found.first) == (sum(differ), differ.index(True)), tried
            same = sum(each and not d for each, d in zip(differ, distance.tolist(), strict=True))
            assert found.same_value == same, tried
            for norm, numbers in zip(map(root, found.squares), (y - x, x, y), strict=True):
                assert math.isclose(norm, math.hypot(*numbers.tolist()), rel_tol=1e-12), tried


def test_of_numbers_near_to_their_opposites_the_nearest_has_not_always_the_largest_share() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.ones(100, dtype=dtype)
        b = a * -0.90625
        b[50] = -1.1015625
        assert found_in(a, b).max_rel == 2.1015625 / 1.1015625, dtype


def test_what_differs_behind_a_long_run_of_equal_elements_is_found() -> None:
    a = torch.ones(100_001)
    for at in (0, 6_249, 6_250, 99_999, 100_000):
        b = a.clone()
        b[at] = 3
        found = found_in(a, b)
        assert (found.elements, found.first, found.max_abs, found.max_rel) == (1, at, 2, 2 / 3)
