"""Tensors that are computed of tiles: whatever the codes and whatever the interval, they are the exact products."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from effort import examples
from evaluate import evaluate
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tiled import Sample, samples, stored

from ckptconv.storage.files import Readers
from ckptconv.tensors import dequantize, kernels
from ckptconv.tensors.computing import Axis, Dequantize, Tiled
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Convert, Inline
from ckptconv.tensors.moves import Cast
from ckptconv.tensors.slices import Span, sliced
from ckptconv.verification.evaluate import Evaluator, footprint


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
    with Readers() as readers:
        evaluator = Evaluator(readers)
        assert evaluator.flat(tensor, start, stop).tobytes() == sample.bits.reshape(-1)[start:stop].tobytes()
        size = Path(tensor.parts[0].inputs()[0].path).stat().st_size
        assert all(0 <= low <= high <= size for _, low, high in footprint(tensor, start, stop))
