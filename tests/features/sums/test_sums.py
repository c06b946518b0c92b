"""A weighted sum is added up in float64, in order, and a sum that is no number is one NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.features.sums.kernels import JOINING, WeightedSum
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.kernels import Lost, apply

DOUBLES = st.floats(-1e300, 1e300)
F64 = DTYPES["float64"]


@examples(50)
@given(terms=st.lists(st.tuples(DOUBLES, st.floats(-10, 10)), min_size=1, max_size=5), over=st.floats(0.5, 8))
def test_each_product_and_each_sum_is_rounded_in_order(terms: list[tuple[float, float]], over: float) -> None:
    kernel = WeightedSum(("float64",) * len(terms), tuple(weight for _, weight in terms), over)
    result, lost = apply((kernel,), np.array([number for number, _ in terms]).tobytes())
    total = terms[0][0] * terms[0][1]
    for number, weight in terms[1:]:
        total += number * weight
    expected = total / over
    assert np.frombuffer(result, "f8").tolist() == [expected] or math.isnan(expected)
    assert lost == Lost(nan=math.isnan(expected))


def test_a_sum_that_is_no_number_is_the_nan_without_sign_or_payload() -> None:
    kernel = WeightedSum(("float32", "float64"), (1.0, -1.0), 1.0)
    result, lost = apply((kernel,), np.array([np.inf], "f4").tobytes() + np.array([np.inf]).tobytes())
    assert lost == Lost(nan=1)
    assert bytes(result) == np.array([np.nan]).tobytes()


@pytest.mark.parametrize(
    ("kernel", "fits"),
    [
        (WeightedSum(("float64", "float64"), (1.0, 2.0), 1.0), True),
        (WeightedSum(("float64", "float32"), (1.0, 2.0), 1.0), False),
        (WeightedSum(("float64", "float64"), (1.0,), 1.0), False),
        (WeightedSum(("float64", "float64"), (1.0, 2.0), 0.0), False),
    ],
)
def test_a_kernel_from_a_file_fits_its_terms_or_is_refused(kernel: WeightedSum, fits: bool) -> None:
    assert JOINING[WeightedSum].fits(kernel, [F64, F64], F64) is fits
