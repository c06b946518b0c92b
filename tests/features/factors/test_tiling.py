"""Tiles of products: how large they are, where windows of them end, and what they are of."""

from __future__ import annotations

import numpy as np
import pytest
from features.factors.cells import SAMPLES
from kernel_samples import evaluated, made

from ckptconv.engine.tasks import Window, tasks
from ckptconv.features.factors.kernels import TILING, LowRank
from ckptconv.plan import Data, FilePlan
from ckptconv.tensors.computing import Axis, Tile, Tiled
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Convert, Inline, LazyTensor, Stored, Zeros
from ckptconv.tensors.moves import Assembled, Cast, File


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_windows_of_what_is_computed_by_rows_end_where_rows_do(dtype: str) -> None:
    """A tile that begins or ends within a row costs as much as one of many rows."""
    shapes = (500, 200), (500, 8), (8, 200)
    parts = tuple(Zeros(DTYPES["bfloat16"], shape) for shape in shapes)
    axes = ((Axis(0), Axis(1)), (Axis(0), Axis(0, 0)), (Axis(0, 0), Axis(1)))
    merged: LazyTensor = Tiled(parts, axes, LowRank(1.0), DTYPES["float64"], shapes[0], (0, 0))
    if dtype != "float64":
        merged = Convert(merged, Cast("float64", dtype), DTYPES[dtype])
    file = FilePlan("", merged.nbytes, (Data(0, merged, ""),))
    unit = 19_000
    for window in tasks(file, unit, True):
        assert isinstance(window, Window)
        (tile,) = merged.moves(window.start, window.stop, "output", unit)
        assert isinstance(tile.kernels[0], Tile)
        assert tile.kernels[0].counts[1] == 200


def test_a_tile_is_small_if_its_inputs_have_long_rows() -> None:
    file = File("x", 1 << 40)
    for rows, columns, rank in ((9, 1 << 14, 1 << 10), (1 << 20, 3, 1 << 12), (5, 7, 3)):
        base = Stored(file, 0, DTYPES["float32"], (rows, columns), (columns, 1))
        left = Stored(file, 0, DTYPES["float32"], (rows, rank), (rank, 1))
        right = Stored(file, 0, DTYPES["float32"], (rank, columns), (columns, 1))
        axes = (Axis(0), Axis(1)), (Axis(0), Axis(0, 0)), (Axis(0, 0), Axis(1))
        made = Tiled((base, left, right), axes, LowRank(1.0), DTYPES["float64"], (rows, columns), (0, 0))
        move = next(made.moves(0, made.nbytes))
        assert isinstance(move.source, Assembled)
        assert move.source.nbytes < 20 << 20


@pytest.mark.parametrize("turned", [False, True])
def test_columns_of_the_second_factor_are_multiplied_before_products_are_added(turned: bool) -> None:
    (base, left, right), axes = SAMPLES[LowRank].parts, SAMPLES[LowRank].axes
    axes = tuple(
        tuple(Axis(1 - axis.dim if not turned and axis.num else axis.dim, axis.num) for axis in each)
        for each in axes[1:]
    )
    times = Inline(np.array([3, 0.1], "<f4").tobytes(), DTYPES["float32"], (2,))
    whole = ((Axis(0), Axis(1)), *axes, axes[1][1:])
    tensor = Tiled((base, left, right, times), whole, LowRank(0.3), DTYPES["float64"], (2, 2), (0, 0))
    one, other, factors = (
        np.frombuffer(made(part), f"f{part.dtype.itemsize}").astype("f8") for part in (left, right, times)
    )
    rows = one.reshape(2, 2), other.reshape(2, 2) * factors
    product = rows[0][:, :1] * rows[1][:1] + rows[0][:, 1:] * rows[1][1:]
    wanted = np.frombuffer(made(base)).reshape(2, 2) + 0.3 * (product.T if turned else product)
    assert {made(tensor), *evaluated(tensor)} == {wanted.tobytes()}


def test_numbers_of_other_columns_fit_no_product() -> None:
    tensor = SAMPLES[LowRank]
    fits = TILING[LowRank].fits
    numbers = Zeros(DTYPES["float32"], (2,))
    assert fits(tensor)
    assert fits(tensor.replaced(parts=(*tensor.parts, numbers), axes=(*tensor.axes, (tensor.axes[2][1],))))
    assert not fits(tensor.replaced(parts=(*tensor.parts, numbers), axes=(*tensor.axes, (tensor.axes[1][0],))))
    assert not fits(tensor.replaced(parts=(*tensor.parts, numbers, numbers), axes=(*tensor.axes, (), ())))
