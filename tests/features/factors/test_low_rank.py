"""Products of adapters' factors: they are rounded as their sums in order are, in whatever order a BLAS adds."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ckptconv import process
from ckptconv.features.factors import low_rank
from ckptconv.features.factors.kernels import LowRank
from ckptconv.tensors.computing import Axis, Box, Tile
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.float_formats import numbers
from ckptconv.tensors.kernels import apply
from ckptconv.tensors.moves import Cast

_STORED = ("bfloat16", "float16", "float32", "float64")
_RIGHT = low_rank.multiply


def _bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Return bits of numbers: like those of models, small integers, whose sums are often between two numbers, tiny or
    huge ones, or any bits."""
    if kind == "any":
        return rng.integers(0, 256, (*shape, DTYPES[dtype].itemsize), "u1").view(f"u{DTYPES[dtype].itemsize}")[..., 0]
    values = {
        "model": lambda: rng.standard_normal(shape) * 0.02,
        "integers": lambda: rng.integers(-3, 4, shape) * 2.0 ** rng.integers(-6, 7, shape),
        "tiny": lambda: rng.standard_normal(shape) * 2.0 ** rng.integers(-80, -60, shape),
        "huge": lambda: rng.standard_normal(shape) * 2.0 ** rng.integers(50, 65, shape),
        "zero": lambda: np.zeros(shape),
    }[kind]()
    size = DTYPES[dtype].itemsize
    return np.frombuffer(apply((Cast("float64", dtype),), values.astype("f8").tobytes())[0], f"u{size}").reshape(shape)


_KINDS = st.sampled_from(["model", "model", "integers", "tiny", "huge", "zero", "any"])


def _tile(
    rng: np.random.Generator, shape: tuple[int, int], rank: int, dtypes: list[str], kinds: list[str], turned: bool
) -> tuple[Tile, bytes]:
    """Return a tile, and its inputs: of four dtypes, the last one multiplies the columns of the second factor."""
    rows, columns = shape
    sides = (rows, rank), (rank, columns)
    shapes = (shape, *(sides if not turned else ((columns, rank), (rank, rows))))
    axes = (
        (Axis(0), Axis(1)),
        (Axis(int(turned)), Axis(0, 0)),
        (Axis(0, 0), Axis(1 - turned)),
        (Axis(1 - turned),),
    )
    boxes, data = [], b""
    for size, dtype, kind, each in zip((*shapes, shapes[2][1:]), dtypes, kinds, axes, strict=False):
        data += bytes(-len(data) % 16)
        boxes.append(Box(len(data), dtype, (0,) * len(size), size, each))
        data += _bits(rng, dtype, size, kind).tobytes()
    return Tile(LowRank(float(rng.choice([2.0, 0.3, 1e-9, -16.0, 1e-50]))), (0, 0), shape, tuple(boxes)), data


def _shuffled(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Add in another order, in pieces."""
    order = np.random.default_rng(len(right)).permutation(len(right))
    out[...] = 0
    for some in np.array_split(order, 3):
        out += left[:, some] @ right[some]


def _as_far_off_as_may_be(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Be wrong by what sums in some order may be, at each element one way or the other."""
    unit = np.finfo(out.dtype).eps / 2
    exact, most = left.astype("f8") @ right.astype("f8"), np.abs(left).astype("f8") @ np.abs(right).astype("f8")
    signs = np.random.default_rng(len(right)).choice([-1, 1], out.shape)
    out[...] = exact + signs * (len(right) - 1) * unit * most


@examples(150, *HealthCheck)
@given(
    st.integers(0, 1 << 30),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from([1, 2, 5, 16, 65]),
    st.lists(st.sampled_from(_STORED), min_size=3, max_size=4),
    st.lists(_KINDS, min_size=4, max_size=4),
    st.booleans(),
    st.sampled_from(_STORED[:3]),
    st.sampled_from([_RIGHT, _shuffled, _as_far_off_as_may_be]),
)
def test_what_is_rounded_is_the_sum_in_order(seed, shape, rank, dtypes, kinds, turned, target, multiply) -> None:  # type: ignore[no-untyped-def]
    tile, data = _tile(np.random.default_rng(seed), shape, rank, dtypes, kinds, turned)
    wanted, lost = apply((tile, Cast("float64", target)), data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_rank, "multiply", multiply)
        patch.setattr(low_rank, "BLOCK", 512)
        patch.setattr(low_rank, "WIDE", 16)
        patch.setattr(low_rank, "PICKED", 4 * rank)
        made, count = apply((tile._replace(cast=target),), data)
    assert bytes(made) == bytes(wanted)
    assert count.infinite == lost.infinite


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_products_may_be_as_far_off_as_the_bound_says(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tile, data = _tile(np.random.default_rng(1), (200, 300), 64, [dtype] * 3, ["model"] * 3, False)
    tile = tile._replace(kernel=LowRank(1.0))
    wanted, _ = apply((tile, Cast("float64", dtype)), data)
    monkeypatch.setattr(low_rank, "multiply", _as_far_off_as_may_be)
    made, _ = apply((tile._replace(cast=dtype),), data)
    assert bytes(made) == bytes(wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_few_elements_of_a_model_are_added_up_in_order(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tile, data = _tile(np.random.default_rng(1), (200, 300), 32, [dtype] * 3, ["model"] * 3, False)
    picked = []
    right = low_rank.add_some

    def adding(given, rows, columns):  # type: ignore[no-untyped-def]
        picked.append(len(rows))
        return right(given, rows, columns)

    def refuse(*given: object) -> None:
        raise AssertionError("a whole block was added up in order")

    monkeypatch.setattr(low_rank, "add_some", adding)
    monkeypatch.setattr(low_rank, "add_all", refuse)
    apply((tile._replace(kernel=LowRank(0.1), cast=dtype),), data)
    assert sum(picked) < 200 * 300 * 0.02


def test_a_sum_between_two_numbers_is_rounded_by_the_sum_in_order() -> None:
    """In order, 1 vanishes beside 2**53 before the last number takes that away; in another it is left."""
    base, left, right = np.zeros((1, 1)), np.array([[2.0**53, 1.0, -(2.0**53)]]), np.ones((3, 1))
    parts = (base, left, right)
    axes = (Axis(0), Axis(1)), (Axis(0), Axis(0, 0)), (Axis(0, 0), Axis(1))
    data = b"".join(part.tobytes() for part in parts)
    offsets = (0, 8, 32)
    boxes = (Box(at, "float64", (0, 0), part.shape, each) for at, part, each in zip(offsets, parts, axes, strict=True))
    made, _ = apply((Tile(LowRank(1.0), (0, 0), (1, 1), tuple(boxes), "float32"),), data)
    assert numbers("float32", np.frombuffer(made, "u4"), np.empty(1, "u4")) == [0.0]


@pytest.mark.parametrize("rank", [1000, low_rank.DEEP, low_rank.DEEP + 1, 6000])
def test_of_any_rank_few_elements_are_added_up_in_order(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the sums of many products are too uncertain for most elements, and in float64 they are not."""
    tile, data = _tile(np.random.default_rng(2), (12, 17), rank, ["bfloat16"] * 3, ["zero", "model", "model"], False)
    wanted, _ = apply((tile, Cast("float64", "bfloat16")), data)
    made = []
    right = low_rank.Products.of.__func__

    def noting(cls, given, precision, target):  # type: ignore[no-untyped-def]
        made.append(precision.dtype)
        return right(cls, given, precision, target)

    def refuse(*given: object) -> None:
        raise AssertionError("a whole block was added up in order")

    monkeypatch.setattr(low_rank.Products, "of", classmethod(noting))
    monkeypatch.setattr(low_rank, "add_all", refuse)
    assert bytes(apply((tile._replace(cast="bfloat16"),), data)[0]) == bytes(wanted)
    assert made == (["float32", "float64"] if rank <= low_rank.DEEP else ["float64"])


def test_a_sum_is_left_where_the_work_is_to_end() -> None:
    tile, data = _tile(np.random.default_rng(3), (40, 40), 5, ["float64"] * 3, ["any"] * 3, False)
    stop, asked = threading.Event(), []

    class Asked(threading.Event):
        def is_set(self) -> bool:
            asked.append(None)
            return len(asked) > 1

    def work() -> None:
        process.heed(Asked())
        with pytest.raises(process.EndedError):
            apply((tile,), data)
        stop.set()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert stop.is_set()
    apply((tile,), data)
