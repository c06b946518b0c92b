"""Whatever a map does, elements are read and written many at a time, in either direction."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from features.maps.test_bijections import rules, shapes_of, text_of
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import ckptconv

# Calls for each MiB, where every element by itself would take half a million. Buffers are small here: 256 KiB.
MOST = 25_000
FEW_TENSORS, ELEMENTS = 64, 1 << 19


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many times the operating system is asked to read or to write at a place."""
    count: Counter[str] = Counter()
    for name in ("pread", "preadv", "pwrite", "pwritev"):
        function = getattr(os, name)

        def counting(*args: Any, function: Any = function, name: str = name) -> Any:
            count[name] += 1
            return function(*args)

        monkeypatch.setattr(os, name, counting)
    return count


def _enlarge(made: list[list[list[str]]], sizes: dict[str, int], choose: random.Random) -> None:
    """Make axes longer until the tensors have many elements, and there are few tensors on both sides."""
    turned = [[right, left] for left, right in made]
    for _ in range(60):
        axis = choose.choice(sorted(sizes))
        before = sizes[axis]
        sizes[axis] *= choose.choice([2, 3, 5])
        shapes = shapes_of(made, sizes)
        elements = sum(int(np.prod(shape)) for shape in shapes.values())
        if elements > 2 * ELEMENTS or max(len(shapes), len(shapes_of(turned, sizes))) > FEW_TENSORS:
            sizes[axis] = before
        elif elements > ELEMENTS:
            return


def _convert(calls: Counter[str], source: Path, target: Path, named: str, sizes: dict[str, int]) -> float:
    """Convert with a map; return how many calls that takes for each MiB."""
    calls.clear()
    ckptconv.convert(source, target, map=named, size=sizes, memory=1 << 20)
    return sum(calls.values()) / (target.stat().st_size / (1 << 20))


@examples(12, HealthCheck.function_scoped_fixture)
@given(rules(), st.randoms(use_true_random=False))
def test_elements_are_read_and_written_many_at_a_time(
    tmp_path_factory: pytest.TempPathFactory,
    calls: Counter[str],
    made: tuple[list[list[list[str]]], dict[str, int]],
    choose: random.Random,
) -> None:
    found, sizes = made
    _enlarge(found, sizes, choose)
    place = tmp_path_factory.mktemp("map")
    numbers = np.random.default_rng(0)
    arrays = {name: numbers.integers(0, 1 << 16, shape, "u2") for name, shape in shapes_of(found, sizes).items()}
    there, back, again = (place / f"{name}.safetensors" for name in ("there", "back", "again"))
    save_file(arrays, there)
    (place / "map.toml").write_text(text_of(found))
    assert _convert(calls, there, back, f"{place}/map.toml:right", sizes) < MOST
    assert _convert(calls, back, again, f"{place}/map.toml:left", {}) < MOST
    for name, array in load_file(again).items():
        np.testing.assert_array_equal(array, arrays[name])


def test_transposed_tensors_that_take_turns_are_put_together_before_they_are_written(
    tmp_path: Path, calls: Counter[str]
) -> None:
    """gpt-oss: gate and up of each expert, transposed, in every second column."""
    shape = 360, 512
    arrays = {
        f"{expert}.{name}.weight": np.random.default_rng(expert).integers(0, 1 << 16, shape, "u2")
        for expert in range(3)
        for name in ("gate", "up")
    }
    save_file(arrays, tmp_path / "there.safetensors")
    (tmp_path / "map.toml").write_text(
        '[[rule]]\na = ["{e}.gate.weight : f h", "{e}.up.weight : f h"]\nb = "gate_up : e h (f (1 + 1))"\n'
    )
    back, again = tmp_path / "back.safetensors", tmp_path / "again.safetensors"
    assert _convert(calls, tmp_path / "there.safetensors", back, f"{tmp_path}/map.toml", {}) < 5000
    pairs = [[arrays[f"{expert}.{name}.weight"].T for name in ("gate", "up")] for expert in range(3)]
    expected = np.stack([np.stack(pair, -1).reshape(512, 720) for pair in pairs])
    np.testing.assert_array_equal(load_file(back)["gate_up"], expected)
    assert _convert(calls, back, again, f"{tmp_path}/map.toml", {}) < 5000
    for name, array in load_file(again).items():
        np.testing.assert_array_equal(array, arrays[name])
