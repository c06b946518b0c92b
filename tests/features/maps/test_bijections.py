"""Any map of random rules uses every element of its source once, and its reverse gives the source back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from features.maps.mapping import Checkpoint, numbered, same, values
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ckptconv.errors import CkptconvError
from ckptconv.features.maps.compile import apply_map
from ckptconv.features.maps.file import parse_map

AXES = "abcd"


@st.composite
def composed(draw: st.DrawFn, words: list[str]) -> str:
    """Axes as the dimensions of a tensor: some of them together in one."""
    dims: list[str] = []
    while words:
        count = draw(st.integers(1, len(words)))
        dims.append(words[0] if count == 1 else f"({' '.join(words[:count])})")
        words = words[count:]
    return " ".join(dims)


@st.composite
def side(draw: st.DrawFn, name: str, own: list[str], common: list[str]) -> list[str]:
    """Tensors that hold the pieces `own`, in order, each with all `common` axes; one of these may be in names."""
    tensors = []
    while own:
        count = draw(st.integers(1, len(own)))
        some, own = own[:count], own[count:]
        mine = some[0]
        if count > 2 and draw(st.booleans()):
            mine = f"(({' + '.join(some[:2])}) + {' + '.join(some[2:])})"
        elif count > 1:
            mine = f"({' + '.join(some)})"
        axes = draw(st.permutations(common))
        stack = axes.pop() if axes and draw(st.integers(0, 2)) == 0 else ""
        axes.insert(draw(st.integers(0, len(axes))), mine)
        index = f".{{{stack}}}" if stack else ""
        tensors.append(f"{name}{len(tensors)}{index} : {draw(composed(axes))}")
    return tensors


@st.composite
def rules(draw: st.DrawFn) -> tuple[list[list[list[str]]], dict[str, int]]:
    """Rules, and the size of each axis."""
    sizes: dict[str, int] = {}
    found = []
    for number in range(draw(st.integers(1, 3))):
        common = [f"{axis}{number}" for axis in AXES[: draw(st.integers(0, 3))]]
        own = [f"p{number}_{index}" for index in range(draw(st.integers(1, 4)))]
        sizes.update((axis, draw(st.integers(1, 3))) for axis in (*common, *own))
        found.append([draw(side(f"{name}{number}.", own, common)) for name in ("left", "right")])
    return found, sizes


def text_of(rules: list[list[list[str]]]) -> str:
    return "".join(f"[[rule]]\nleft = {left!r}\nright = {right!r}\n" for left, right in rules)


def shapes_of(rules: list[list[list[str]]], sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The tensors of the left side, worked out from the text by Python's own arithmetic."""
    shapes: dict[str, tuple[int, ...]] = {}
    for left, _ in rules:
        for text in left:
            name, _, axes = text.partition(" : ")
            expression = axes.replace(") (", "),(").replace(" + ", "+")
            dims, depth, word = [], 0, ""
            for character in f"{expression} ":
                depth += {"(": 1, ")": -1}.get(character, 0)
                if character in " ," and not depth:
                    dims.append(word)
                    word = ""
                else:
                    word += character
            shape = tuple(eval(dim.replace(" ", "*"), {}, dict(sizes)) for dim in dims if dim)
            if "{" in name:
                index = name[name.index("{") + 1 : -1]
                shapes.update((f"{name[: name.index('{')]}{at}", shape) for at in range(sizes[index]))
            else:
                shapes[name] = shape
    return shapes


@examples(50, HealthCheck.function_scoped_fixture)
@given(rules())
def test_there_and_back_is_the_identity(tmp_path: Path, made: tuple[Any, dict[str, int]]) -> None:
    found, sizes = made
    map_ = parse_map(text_of(found), "random.toml")
    arrays = numbered(**shapes_of(found, sizes))
    there = apply_map(map_, Checkpoint(tmp_path / "there", arrays).tensors, sizes=sizes)
    moved = values(there.tensors)
    every = np.sort(np.concatenate([array.reshape(-1) for array in moved.values()]))
    np.testing.assert_array_equal(every, np.arange(1, len(every) + 1))
    assert len(every) == sum(array.size for array in arrays.values())
    back = apply_map(map_, Checkpoint(tmp_path / "back", moved).tensors, sizes=there.sizes)
    same(values(back.tensors), arrays)


@examples(40, HealthCheck.function_scoped_fixture)
@given(rules(), st.data())
def test_a_faulty_map_is_an_error_that_names_a_tensor(
    tmp_path: Path, made: tuple[Any, dict[str, int]], data: st.DataObject
) -> None:
    found, sizes = made
    arrays = numbered(**shapes_of(found, sizes))
    number = data.draw(st.integers(0, len(found) - 1))
    kind = data.draw(st.sampled_from(["removed", "doubled", "wrong size"]))
    if kind == "removed":
        found = [*found[:number], *found[number + 1 :], [["other"], ["another"]]]
    elif kind == "doubled":
        found = [*found, found[number]]
    else:
        axis = data.draw(st.sampled_from([axis for axis in sizes if f"p{number}_" in axis]))
        sizes = {**sizes, axis: sizes[axis] + data.draw(st.sampled_from([1, 2, 100]))}
    map_ = parse_map(text_of(found), "random.toml")
    with pytest.raises(CkptconvError) as caught:
        apply_map(map_, Checkpoint(tmp_path / "there", arrays).tensors, sizes=sizes)
    assert any(name in caught.value.message for name in arrays)
