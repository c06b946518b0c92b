"""Tiles of products: how large they are, where windows of them end, and that verification finds a fault in them."""

from __future__ import annotations

import pytest
from faults import one_bit, spoiled
from features.merge.cells import SAMPLES

from ckptconv.engine.tasks import Window, tasks
from ckptconv.engine.worker import Worker
from ckptconv.features.merge.kernels import LowRank
from ckptconv.plan import Data, FilePlan
from ckptconv.storage.files import Readers
from ckptconv.tensors.computing import Axis, Tile, Tiled
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Convert, LazyTensor, Stored, Zeros
from ckptconv.tensors.moves import Assembled, Cast, File
from ckptconv.verification.evaluate import Evaluator


def made(tensor: LazyTensor) -> bytes:
    with Readers() as readers:
        return bytes(Worker(readers, None, 1 << 12).bytes_of(Data(0, tensor, "x"), 0, tensor.nbytes))


def evaluated(tensor: LazyTensor) -> bytes:
    with Readers() as readers:
        return Evaluator(readers).flat(tensor, 0, tensor.numel).tobytes()


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


def test_its_evaluator_finds_a_fault_in_products_that_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = Convert(SAMPLES[LowRank], Cast("float64", "bfloat16"), DTYPES["bfloat16"])
    assert made(tensor) == evaluated(tensor)
    spoiled(Tile, one_bit)(monkeypatch)
    assert made(tensor) != evaluated(tensor)
