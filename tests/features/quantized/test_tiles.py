"""Tensors that are computed of tiles: whatever the codes and whatever the interval, they are the exact products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from cells import of_features
from compare import evaluate
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ckptconv.features.quantized import dequantize
from ckptconv.features.quantized.computing import Dequantize
from ckptconv.storage.files import Readers
from ckptconv.tensors import kernels
from ckptconv.tensors.computing import Axis, Tiled
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Convert, Inline, LazyTensor, Stored
from ckptconv.tensors.moves import Cast, File
from ckptconv.tensors.slices import Span, sliced

# Random tensors that are computed of tiles, and what they are by plain arithmetic, one element at a time.

F32 = DTYPES["float32"]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


class Sample(NamedTuple):
    """A tensor, and the bits of its elements."""

    tensor: Tiled
    bits: np.ndarray


def rounded(exact: Fraction, digits: int = 24, least: int = -149) -> float:
    """The multiple of the last place nearest to a number, the even one of two."""
    if exact == 0:
        return 0.0
    exponent = math.frexp(abs(exact.numerator) / exact.denominator)[1] if abs(exact) < 1 << 900 else 0
    step = Fraction(2) ** max(exponent - digits, least)
    return float(round(exact / step) * step)


def e4m3(code: int) -> float:
    if code & 127 == 127:
        return math.nan
    exponent, mantissa = code >> 3 & 15, code & 7
    size = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    return -size if code & 128 else size


def six_bits(code: int, mantissa: int) -> float:
    """A float of six bits, with so many of mantissa, and without infinity and NaN."""
    exponent, fraction = divmod(code & 31, 1 << mantissa)
    bias = (1 << 4 - mantissa) - 1
    size = math.ldexp(fraction + ((1 << mantissa) if exponent else 0), max(exponent, 1) - bias - mantissa)
    return -size if code & 32 else size


FLOATS = {
    "e2m1": E2M1,
    "e2m3": [six_bits(code, 3) for code in range(64)],
    "e3m2": [six_bits(code, 2) for code in range(64)],
    "quarters": [math.copysign(code & 7, 7.5 - code) / 4 for code in range(16)],
}


# A scale: bytes of an element, its numbers, and how to read them.
SCALES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], tuple[bytes, np.ndarray]]] = {
    "float32": lambda random, shape: numbers("<f4", np.exp2(random.uniform(-12, 3, shape)).astype("f4")),
    "float16": lambda random, shape: numbers("<f2", np.exp2(random.uniform(-9, 3, shape)).astype("f2")),
    "bfloat16": lambda random, shape: upper_halves(np.exp2(random.uniform(-9, 3, shape)).astype("f4")),
    "float8_e8m0fnu": lambda random, shape: powers(random.integers(90, 150, shape, "u1")),
    "float8_e4m3fn": lambda random, shape: small(random.integers(1, 120, shape, "u1")),
}


def numbers(code: str, values: np.ndarray) -> tuple[bytes, np.ndarray]:
    return values.astype(code).tobytes(), values.astype("f8")


def upper_halves(values: np.ndarray) -> tuple[bytes, np.ndarray]:
    bits = values.view("u4") >> 16
    return bits.astype("<u2").tobytes(), (bits << 16).astype("u4").view("f4").astype("f8")


def powers(codes: np.ndarray) -> tuple[bytes, np.ndarray]:
    return codes.tobytes(), np.exp2(codes.astype("f8") - 127)


def small(codes: np.ndarray) -> tuple[bytes, np.ndarray]:
    return codes.tobytes(), np.vectorize(e4m3, otypes=["f8"])(codes)


def words(codes: np.ndarray, bits: int, dim: int, word: int, order: Sequence[int] | None = None) -> bytes:
    """Codes packed along `dim`, the first into the lowest bits."""
    moved = np.moveaxis(codes, dim, -1)
    rows, extent = moved.reshape(-1, moved.shape[-1]).tolist(), -(-moved.shape[-1] * bits // word)
    made = []
    for row in rows:
        number = 0
        for at, code in enumerate(row):
            if order:
                at += order.index(at % len(order)) - at % len(order)
            number |= (code & (1 << bits) - 1) << at * bits
        made.append(number.to_bytes(extent * word // 8, "little"))
    packed = np.frombuffer(b"".join(made), f"<u{word // 8}").reshape(*moved.shape[:-1], extent)
    return np.ascontiguousarray(np.moveaxis(packed, -1, dim)).tobytes()


def signed(kind: str, codes: np.ndarray) -> np.ndarray:
    """Codes as the integers that they are, in two's complement if they have a sign."""
    return codes.astype("f8") - (16 * (codes > 7) if "signed" in kind else 0)


KINDS = (
    *("own", "int8", "e2m1", "e2m3", "e3m2", "quarters", "table4", "table8", "awq", "signed awq"),
    *("packed int1", "packed int2", "packed int3", "packed int4", "packed int5", "packed int8"),
    *("packed signed4", "packed signed pair"),
)
# Those of which something may be subtracted, and those that lie in bytes.
INTEGERS = frozenset(("int8", *(kind for kind in KINDS if "awq" in kind or "packed" in kind)))
IN_BYTES = frozenset(("table4", "packed signed pair", *FLOATS))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """A tensor that is dequantized; its parts are inline."""
    kind = draw(st.sampled_from(KINDS))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    transposed = draw(st.booleans())
    indexed, zeros = draw(st.booleans()), draw(st.booleans())
    experts = draw(st.sampled_from([(), (2,)]))
    rows, columns = draw(st.integers(1, 20)), draw(st.integers(1, 40))
    if kind.endswith("awq"):
        columns = -(-columns // 8) * 8
    block = (draw(st.sampled_from([1, 4, 64])), draw(st.sampled_from([1, 3, 8, 32, 64])))
    lead = len(experts)
    # The codes have the dimensions of the tensor, or the last two the other way round.
    dims = [*range(lead), *((lead + 1, lead) if transposed else (lead, lead + 1))]
    inner = (rows, columns)
    extents = [*experts, *inner]
    shape = [0] * len(dims)
    for dim, extent in zip(dims, extents, strict=True):
        shape[dim] = extent
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "table4": 4, "own": 8, "table8": 8}.get(kind, 4)
    bits = int(kind[-1]) if kind[-1].isdigit() and "int" in kind else bits
    codes = random.integers(0, 1 << bits, extents)
    if kind == "own":
        codes[codes & 127 == 127] = 3
    packed = draw(st.sampled_from([lead, lead + 1])) if kind.startswith("packed") else lead + 1
    parts: list[LazyTensor] = []
    axes: list[tuple[Axis, ...]] = []
    roles: list[str] = ["scale"]
    plain = [Axis(dim) for dim in dims]
    offset = draw(st.sampled_from([0, 1, 8])) if kind in INTEGERS else 0

    def add(dtype: str, data: bytes, shape: Sequence[int], about: Sequence[Axis]) -> None:
        parts.append(Inline(data, DTYPES[dtype], tuple(int(extent) for extent in shape)))
        axes.append(tuple(about))

    def add_packed(codes: np.ndarray, dim: int, about: list[Axis]) -> None:
        word = 8 if kind in IN_BYTES else 32
        order = [0, 2, 4, 6, 1, 3, 5, 7] if kind.endswith("awq") else [1, 0] if kind == "table4" else None
        extent = list(codes.shape)
        extent[dim] = -(-extent[dim] * bits // word)
        about = [axis._replace(num=bits, den=word) if at == dim else axis for at, axis in enumerate(about)]
        add("uint8" if word == 8 else "int32", words(codes, bits, dim, word, order), extent, about)

    values: np.ndarray
    if kind in ("own", "int8", "table8"):
        dtype = {"own": "float8_e4m3fn", "int8": "int8", "table8": "uint8"}[kind]
        add(dtype, codes.astype("u1").tobytes(), codes.shape, plain)
        values = {"own": np.vectorize(e4m3, otypes=["f8"]), "int8": lambda c: c.astype("i1").astype("f8")}.get(
            kind, lambda c: c.astype("f8")
        )(codes)
    else:
        add_packed(codes, packed, plain)
        values = np.array(FLOATS[kind])[codes] if kind in FLOATS else signed(kind, codes)
    grid = [*experts, *(-(-extent // side) for extent, side in zip(inner, block, strict=True))]
    about = [*plain[:lead], *(Axis(dims[lead + at], 1, side) for at, side in enumerate(block))]
    picks = [np.arange(extent) // (1 if at < lead else block[at - lead]) for at, extent in enumerate(extents)]
    index = None
    if indexed and kind not in ("table4", "table8"):
        index = random.integers(0, grid[-1], columns)
        picks[-1] = index
        about[-1] = Axis(dims[-1], 0)
    name = draw(st.sampled_from(sorted(SCALES)))
    data, scales = SCALES[name](random, tuple(grid))
    add(name, data, grid, about)
    subtracted = np.full(values.shape, float(offset))
    is_float = False
    if zeros and kind in INTEGERS:
        roles.append("zero")
        few = random.integers(0, 1 << bits, grid)
        if draw(st.booleans()):
            few = random.uniform(-9, 9, grid).astype("f4")
            add("float32", few.tobytes(), grid, about)
            is_float = True
        elif kind == "int8":
            add("int8", few.astype("u1").tobytes(), grid, about)
            few = few.astype("i1")
        else:
            # Zeros are packed along a dimension that has one for each element.
            ones = [at for at, axis in enumerate(about) if (axis.num, axis.den) == (1, 1)]
            if kind.endswith("awq"):
                ones = [len(grid) - 1] if len(grid) - 1 in ones else []
            if not ones:
                roles.pop()
                few = np.zeros(grid)
            else:
                add_packed(few, ones[-1], about)
                few = signed(kind, few)
        subtracted = subtracted + few[np.ix_(*picks)].astype("f8")
    if index is not None:
        roles.append("index")
        add("int32", index.astype("<i4").tobytes(), (columns,), (Axis(dims[-1]),))
    if kind in ("table4", "table8"):
        table = random.uniform(-1, 1, 1 << bits).astype("f4")
        roles.append("table")
        add("float32", table.tobytes(), (1 << bits,), (Axis(0, 0),))
        values = table.astype("f8")[codes]
    # Each column, or all of the weight, is multiplied by something; to each block, or to all, something is added.
    blocks = [*plain[:lead], *(Axis(dims[lead + at], 1, side) for at, side in enumerate(block))]
    spread = [np.arange(extent) // (1 if at < lead else block[at - lead]) for at, extent in enumerate(extents)]
    more: dict[str, np.ndarray] = {}
    for role, shape_, about_ in (("times", (columns,), plain[-1:]), ("shift", tuple(grid), blocks)):
        if not draw(st.booleans()):
            continue
        of_all = draw(st.booleans()) and index is None
        given_ = random.uniform(0.5, 2, (1,) if of_all else shape_).astype("f4")
        roles.append(role)
        add("float32", given_.tobytes(), given_.shape, [Axis(0, 0)] if of_all else about_)
        if not of_all and role == "shift":
            given_ = given_[np.ix_(*spread)]
        more[role] = np.broadcast_to(given_, values.shape)
    over = draw(st.booleans())
    codes_name = kind.removeprefix("packed ") if kind != "int8" else "own"
    kernel = Dequantize(codes_name, tuple(roles), offset, over, "float32", "x.scale")
    tensor = Tiled(tuple(parts), tuple(axes), kernel, F32, tuple(shape), (0,) * len(shape))
    factor = scales[np.ix_(*picks)]
    made = np.empty(values.shape, "f4")
    for at in np.ndindex(*values.shape):
        code, scale = Fraction(values[at]) - Fraction(subtracted[at]), Fraction(factor[at])
        # Zero points that are floats are subtracted as these.
        code = Fraction(rounded(code)) if is_float else code
        exact = code / scale if over else code * scale
        made[at] = rounded(exact)
        if code == 0 and math.copysign(1, values[at]) < 0 and not subtracted[at]:
            made[at] = -0.0
        if "times" in more and made[at]:
            made[at] = rounded(Fraction(float(made[at])) * Fraction(float(more["times"][at])))
        if "shift" in more:
            made[at] = rounded(Fraction(float(made[at])) + Fraction(float(more["shift"][at])))
    return Sample(tensor, np.ascontiguousarray(made.transpose(np.argsort(dims))).view("u4"))


def stored(tensor: Tiled, path: str) -> Tiled:
    """The same tensor with its parts in a file."""
    content, parts = b"", []
    for part in tensor.parts:
        assert isinstance(part, Inline)
        content += bytes(-len(content) % 8)
        parts.append((part, len(content)))
        content += part.data
    with open(path, "wb") as file:
        file.write(content)
    whole = File(path, len(content))
    steps = [Stored(whole, at, part.dtype, part.shape, strides_of(part.shape)) for part, at in parts]
    return tensor.__class__(
        tuple(steps), tensor.axes, tensor.kernel, tensor.dtype, tensor.shape, tensor.starts, tensor.whole
    )


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


@examples(60, *HealthCheck)
@given(samples(), st.data())
def test_the_moves_of_any_interval_make_the_products(sample: Sample, data: st.DataObject) -> None:
    tensor, bits = sample
    whole = bits.astype("<u4").tobytes()
    start = data.draw(st.integers(0, tensor.nbytes))
    stop = data.draw(st.one_of(st.just(tensor.nbytes), st.integers(start, tensor.nbytes)))
    limit = data.draw(st.sampled_from([16, 64, 256, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dequantize, "CHUNK", data.draw(st.sampled_from([16, 64, 24 << 10])))
        assert evaluate(tensor, start, stop, "output", limit) == whole[start:stop]
        assert evaluate(tensor, 0, None, "source", limit) == whole


@examples(150, *HealthCheck)
@given(samples(), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_products_are_rounded_as_if_they_were_cast(sample: Sample, dtype: str) -> None:
    tensor, bits = sample
    cast = Cast("float32", dtype)
    expected, _ = kernels.apply((cast,), bits.astype("<u4").tobytes())
    assert evaluate(tensor if dtype == "float32" else Convert(tensor, cast, DTYPES[dtype])) == expected


def test_a_nan_among_the_codes_stays_one() -> None:
    codes = Inline(bytes([0x7F, 0xFF, 0x38, 0]), DTYPES["float8_e4m3fn"], (4,))
    scale = Inline(np.float32(2).tobytes(), DTYPES["float32"], (1,))
    kernel = Dequantize("own", ("scale",), 0, False, "float32", "x.scale")
    tensor = Tiled((codes, scale), ((Axis(0),), (Axis(0, 0),)), kernel, DTYPES["float32"], (4,), (0,))
    assert np.array_equal(np.frombuffer(evaluate(tensor), "f4"), [np.nan, np.nan, 2, 0], equal_nan=True)


@examples(60)
@given(st.lists(st.floats(width=32), min_size=1, max_size=50), st.sampled_from([1.0, 2.0**-10, 2.0**-24]))
def test_float16_between_is_the_nearest(numbers: list[float], unit: float) -> None:
    values = np.array(numbers, "f4") * np.float32(unit)
    with np.errstate(all="ignore"):
        expected = values.astype("f2").astype("f4")
        made = dequantize._rounded(values, "float16")
    finite = ~np.isnan(values)
    assert np.isnan(made[~finite]).all()
    assert made[finite].tobytes() == expected[finite].tobytes()


@examples(40, *HealthCheck)
@given(samples(), st.data())
def test_a_slice_is_the_products_at_its_indices(sample: Sample, data: st.DataObject) -> None:
    tensor, bits = sample
    spans, cut = [], []
    for extent in tensor.shape:
        start = data.draw(st.integers(0, extent - 1))
        step = data.draw(st.sampled_from([1, 1, 2]))
        spans.append(Span(start, step, data.draw(st.integers(1, -(-(extent - start) // step)))))
        cut.append(slice(start, start + (spans[-1].length - 1) * step + 1, step))
    made = sliced(tensor, spans)
    assert evaluate(made) == np.ascontiguousarray(bits[tuple(cut)]).tobytes()


@examples(40, *HealthCheck)
@given(sample=samples(), data=st.data())
def test_the_evaluator_agrees(sample: Sample, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    tensor = stored(sample.tensor, str(tmp_path_factory.getbasetemp() / "parts"))
    start = data.draw(st.integers(0, tensor.numel))
    stop = data.draw(st.integers(start, tensor.numel))
    for evaluator, footprint in of_features("EVALUATORS"):
        with Readers() as readers:
            elements = evaluator(readers).flat(tensor, start, stop)
        assert elements.tobytes() == sample.bits.reshape(-1)[start:stop].tobytes()
        size = Path(tensor.parts[0].inputs()[0].path).stat().st_size
        assert all(0 <= low <= high <= size for _, low, high in footprint(tensor, start, stop))
