"""inspect --stats: the statistics of every dtype, in text and JSON, of any format, local and remote."""

from __future__ import annotations

import functools
import itertools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import ZERO, ckptconv_here
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import save_file
from stores import SOURCES

import ckptconv as library
from ckptconv.features.inspect.summary import tensors_of
from ckptconv.features.reporting import statistics
from ckptconv.features.reporting.measure import measured
from ckptconv.features.reporting.statistics import Moments, Statistics, moments
from ckptconv.formats.detect import open_source
from ckptconv.options.table import Options
from ckptconv.tensors.dtypes import DTYPES


def found_in(array: Any, cuts: list[int] | None = None, dtype: str = "") -> Statistics:
    """The statistics of a numpy array, given in pieces that are cut at these elements."""
    total = Moments()
    bounds = [0, *sorted(cuts or []), array.size]
    pieces = [
        moments(DTYPES[dtype or array.dtype.name], memoryview(array.reshape(-1)[low:high].tobytes()))
        for low, high in itertools.pairwise(bounds)
    ]
    for piece in reversed(pieces):
        total.add(piece)
    return total.statistics()


def exact(values: list[Any]) -> tuple[Fraction, Fraction]:
    """Mean and variance of finite numbers without any rounding."""
    numbers = [Fraction(value) for value in values]
    mean = sum(numbers) / len(numbers)
    return mean, sum((number - mean) ** 2 for number in numbers) / len(numbers)


def is_near(found: float, expected: float, size: float) -> bool:
    """Within 1e-12 of the value itself, or of the numbers that it is the sum of."""
    return math.isclose(found, expected, rel_tol=1e-12, abs_tol=1e-12 * size)


cuts = st.lists(st.integers(0, 40), max_size=4)


@examples(60)
@given(arrays.arrays("f4", st.integers(1, 40), elements=st.floats(width=32)), cuts, st.integers(1, 50))
def test_floats_are_those_of_numpy_in_float64(array: Any, at: list[int], block: int) -> None:
    usual, statistics.BLOCK = statistics.BLOCK, block
    try:
        found = found_in(array, [min(cut, array.size) for cut in at])
    finally:
        statistics.BLOCK = usual
    finite = array[np.isfinite(array)].astype("f8")
    assert (found.nan, found.inf) == (np.isnan(array).sum(), np.isinf(array).sum())
    assert found.zeros == (array == 0).sum()
    if not finite.size:
        assert (found.min, found.max, found.mean, found.std) == (None, None, None, None)
        return
    assert (found.min, found.max) == (finite.min(), finite.max())
    mean, variance = exact(finite.tolist())
    size = float(np.abs(finite).max())
    assert is_near(found.mean, float(mean), size)
    assert is_near(found.std, math.sqrt(variance), size * 1e-3)
    assert is_near(found.mean, finite.mean(), size)


@examples(50)
@given(
    st.sampled_from(["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]).flatmap(
        lambda code: arrays.arrays(code, st.integers(1, 30))
    ),
    cuts,
)
def test_integers_are_exact(array: Any, at: list[int]) -> None:
    found = found_in(array, [min(cut, array.size) for cut in at])
    mean, variance = exact(array.tolist())
    assert (found.min, found.max, found.zeros) == (int(array.min()), int(array.max()), int((array == 0).sum()))
    assert found.mean == float(mean)
    assert math.isclose(found.std, math.sqrt(variance), rel_tol=1e-12)


@examples(50)
@given(arrays.arrays("f8", st.integers(1, 30), elements=st.floats(allow_nan=False, allow_infinity=False)))
def test_a_float64_of_any_size_has_a_mean_and_a_deviation(array: Any) -> None:
    found = found_in(array)
    mean, variance = exact(array.tolist())
    size = float(np.abs(array).max())
    assert is_near(found.mean, float(mean), size)
    assert found.std == 0 or math.isfinite(found.std)
    # A float64 below 1e-307 has fewer digits.
    if variance > Fraction(size) ** 2 / 10**6 and size > 1e-300:
        assert math.isclose(Fraction(found.std) ** 2 / variance, 1, rel_tol=1e-10)


def test_what_is_constant_has_no_deviation_and_far_from_zero_it_is_right() -> None:
    assert found_in(np.full(100_000, 0.1)) == Statistics(0.1, 0.1, 0.1, 0.0, zeros=0, nan=0, inf=0)
    far = np.tile(np.array([1e8, 1e8 + 1]), 200_000)
    assert math.isclose(found_in(far).std, 0.5, rel_tol=1e-12)
    normal = np.random.default_rng(0).standard_normal(1_000_001, dtype="f4")
    found, wide = found_in(normal, [1, 77, 500_000]), normal.astype("f8")
    assert math.isclose(found.mean, math.fsum(wide) / wide.size, rel_tol=1e-12)
    assert math.isclose(found.std, wide.std(), rel_tol=1e-12)


@examples(40)
@given(arrays.arrays("c8", st.integers(1, 20), elements=st.complex_numbers(max_magnitude=100, width=64)))
def test_complex_numbers_have_no_order(array: Any) -> None:
    array[0] = complex(math.nan, math.inf)
    found = found_in(array)
    assert (found.min, found.max, found.nan, found.inf) == (None, None, 1, 0)
    rest = array[1:].astype("c16")
    assert found.zeros == (rest == 0).sum()
    if rest.size:
        assert abs(complex(*found.mean) - rest.mean()) < 1e-10
        assert abs(found.std - rest.std()) < 1e-6


TENSORS: dict[str, Any] = {
    **{
        name: torch.linspace(-4, 4, 3000).reshape(50, 60).to(getattr(torch, name))
        for name in ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int64")
    },
    "uint16": torch.arange(3000).to(torch.uint16),
    "bool": torch.arange(3000) % 3 == 0,
    "complex64": torch.complex(torch.arange(6.0), -torch.arange(6.0)),
    "float8_e8m0fnu": torch.tensor([127, 128, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "transposed": torch.arange(3_000_000, dtype=torch.float32).reshape(1000, 3000).t(),
    "conjugate": torch.complex(torch.arange(6.0), -torch.arange(6.0)).conj(),
    "empty": torch.ones(0, 3),
    "scalar": torch.tensor(-0.0),
}


@functools.cache
def expected(name: str) -> dict[str, Any]:
    """The statistics of one of TENSORS by numpy."""
    tensor = TENSORS[name]
    is_complex = tensor.is_complex()
    if is_complex:
        values = tensor.resolve_conj().numpy().astype("c16")
    else:
        values = (
            (tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor)
            .to(torch.float64)
            .numpy()
        )
    finite = values[np.isfinite(values)]
    has = finite.size > 0
    mean = finite.mean() if has else None
    return {
        "min": finite.min() if has and not is_complex else None,
        "max": finite.max() if has and not is_complex else None,
        "mean": [mean.real, mean.imag] if is_complex else mean,
        "std": finite.std() if has else None,
        "zeros": int((values == 0).sum()),
        "nan": int(np.isnan(values).sum()),
        "inf": 0,
    }


def test_every_dtype_of_a_local_file(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "model.pt")
    check(ckptconv_here("inspect", "--stats", "--json", tmp_path / "model.pt").json)


def test_every_dtype_of_a_remote_file(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "model.pt")
    for make in SOURCES.values():
        place = make()
        url = place.put(tmp_path / "model.pt", "model.pt")
        asked = ["--storage-options", json.dumps(place.options)]
        check(ckptconv_here("inspect", "--stats", "--json", *asked, url).json)


def check(told: dict[str, Any]) -> None:
    """Compare what was told of TENSORS with numpy."""
    assert told["not_finite"] == ["float8_e8m0fnu"]
    for row in told["tensors"]:
        for name, value in expected(row["name"]).items():
            near = value if value is None else pytest.approx(value, rel=1e-12, abs=1e-15)
            assert row["stats"][name] == near, (row["name"], name)
    assert told["bytes_read"] > 3_000_000 * 4


@pytest.mark.parametrize("case", ["z3_bf16_w2", "z1_bf16_frozen_w2"])
def test_joined_parameters_are_those_that_a_conversion_writes(case: str, tmp_path: Path) -> None:
    checkpoint = ZERO / case / "checkpoint"
    library.convert(checkpoint, tmp_path / "model.safetensors", dtype="keep", family="deepspeed")
    of_source, of_output = (
        {row["name"]: row["stats"] for row in ckptconv_here("inspect", path, "--stats", "--json").json["tensors"]}
        for path in (checkpoint, tmp_path / "model.safetensors")
    )
    assert of_source
    assert {name: of_source[name] for name in of_output} == of_output


def test_a_file_of_many_windows_and_threads_gives_the_same_each_time(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensors = {f"w{n}": torch.randn(70_001 * n) for n in range(1, 9)}
    save_file(tensors, tmp_path / "m.safetensors")
    flat, _, *_ = tensors_of(open_source(tmp_path / "m.safetensors"), Options())
    done: list[int] = []
    total: list[int] = []
    found, read = measured(flat, {}, done.append, total.append)
    assert sum(done) == total[0] == sum(tensor.nbytes for tensor in tensors.values()) <= read
    assert measured(flat, {})[0] == found
    assert all(math.isclose(found[name].std, tensor.double().numpy().std()) for name, tensor in tensors.items())


def test_broken_tensors_are_marked_and_come_first(tmp_path: Path) -> None:
    good, bad = torch.ones(3, 3), torch.ones(3)
    bad[1] = math.nan
    torch.save({"good": good, "tied": good, "bad": bad, "inf": torch.tensor([math.inf, 0.0])}, tmp_path / "m.pt")
    run = ckptconv_here("inspect", "--stats", tmp_path / "m.pt")
    lines = run.out[run.out.index("values:") :].splitlines()
    assert lines[0] == "values: 2 of 3 tensors with NaN or infinities"
    assert [line.split()[:2] for line in lines[2:5]] == [["!", "bad"], ["!", "inf"], ["good", "1"]]
    assert lines[2].split()[2:] == ["1", "1", "1", "0", "0", "1", "0"]
    assert lines[3].split()[2:] == ["0", "0", "0", "0", "1", "0", "1"]
    assert not [line for line in lines[2:5] if "tied" in line]
    told = ckptconv_here("inspect", "--stats", "--json", tmp_path / "m.pt")
    assert "NaN" not in told.out
    assert json.loads(told.out)["not_finite"] == ["bad", "inf"]
    by_name = {row["name"]: row["stats"] for row in told.json["tensors"]}
    assert by_name["tied"] == by_name["good"]


def test_only_what_is_chosen_is_read(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(4), "b": torch.ones(500_000)}, "step": 3}, tmp_path / "m.pt")
    told = ckptconv_here(
        "inspect", "--stats", "--json", "--key", "model", "--exclude", "b", "--as", "bf16", tmp_path / "m.pt"
    ).json
    assert [row["name"] for row in told["tensors"]] == ["a"]
    assert told["tensors"][0]["stats"]["mean"] == 1
    assert told["bytes_read"] < 100_000
    assert told["conversion"]["command"].endswith("OUTPUT --dtype bfloat16 --key model --exclude b")
    assert ckptconv_here("inspect", "--include", "nothing", tmp_path / "m.pt").code == 2
    told = ckptconv_here(
        "inspect", "--json", "--key", "model", "--exclude", "nothing", "--exclude", "b", tmp_path / "m.pt"
    ).json
    assert [warning.partition(".")[0] for warning in told["warnings"]] == ["--exclude 'nothing' matches nothing"]


def test_without_stats_there_are_none(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4)}, tmp_path / "m.pt")
    told = ckptconv_here("inspect", "--json", tmp_path / "m.pt").json
    assert "not_finite" not in told
    assert "stats" not in told["tensors"][0]
    assert "values:" not in ckptconv_here("inspect", tmp_path / "m.pt").out


def test_words_for_values_that_are_no_numbers_lead_to_the_statistics(tmp_path: Path) -> None:
    ckptconv_here("inspect", tmp_path, "--nan").refused(2, "Use --stats, which counts NaN and infinite values.")
