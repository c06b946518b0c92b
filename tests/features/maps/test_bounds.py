"""A map costs a bounded number of steps for each name, whatever it says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from effort import every
from features.maps.mapping import Checkpoint, numbered

from ckptconv.errors import LimitError, UsageError
from ckptconv.features.maps import sizes
from ckptconv.features.maps.claims import Templates, precedences
from ckptconv.features.maps.compile import apply_map
from ckptconv.features.maps.file import matches, parse_map
from ckptconv.features.maps.sizes import Expression, resolve

RULE = '[[rule]]\na = "x"\nb = "y"\n'


def test_each_size_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tree of alternatives, sixty sizes of two each would take 2^60 steps."""
    counts: list[str] = []

    class Counted(Expression):
        def __init__(self, text: str) -> None:
            counts.append(text)
            super().__init__(text)

    lines = [f's{at} = ["s{at + 1} * 2", "s{at + 1} + 1"]' for at in range(60)]
    map_ = parse_map(f"{RULE}[sizes]\n" + "\n".join(lines), "deep.toml")
    monkeypatch.setattr(sizes, "Expression", Counted)
    assert resolve(map_.sizes) == {}
    assert len(counts) == 120


def test_what_a_size_refers_to_may_be_many_sizes_away() -> None:
    chain = {f"s{at}": (f"s{at + 1} + 1",) for at in range(99)}
    assert resolve({**chain, "s99": (1,)})["s0"] == 100


@every(
    "text, told",
    [
        (f"{RULE}[sizes]\n" + "".join(f"s{at} = 's{at + 1}'\n" for at in range(3000)), "3000 sizes"),
        (f"{RULE}[sizes]\ns = {[1] * 17}", "17 alternatives"),
        (f"{RULE}[drop]\na = {['x'] * 101}", "more than 100 globs"),
        (f"{RULE}[drop]\na = {['*a' * 600]}", "more than 1000 characters"),
        (f"{RULE}[drop]\na = ['{{a}}x{{b}}y{{c}}z']", "whole part of a name"),
        ("[[rule]]\na = 'x" + " | x" * 32 + "'\nb = 'y'", "33 alternatives"),
        ("[[rule]]\na = 'x :" + " a" * 33 + "'\nb = 'y : a'", "more than 32 axes"),
    ],
)
def test_a_map_of_many_parts_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_map(text, "many.toml")


def test_globs_of_many_wildcards_are_matched_without_going_back() -> None:
    """Nine indices or stars against a long name: anything but linear matching would not end."""
    name = ".".join("a" * 9 for _ in range(200))
    assert not matches(name, ["{a}.{b}.{c}.{d}.{e}.{f}.{g}.{h}.{i}.x", "*a*a*a*a*a*a*a*a*a*x"])
    assert matches(f"{name}.x", ["{a}.{b}.{c}.{d}.{e}.{f}.{g}.{h}.{i}.x"])


def _many(parts: int) -> str:
    """Rules for every choice of two patterns for each part."""
    names = [".".join(("{i%d}", "x{i%d}")[at >> part & 1] % part for part in range(parts)) for at in range(1 << parts)]
    return "".join(f'[[rule]]\na = "{name}"\nb = "{at}.{name}"\n' for at, name in enumerate(names))


def test_names_that_can_be_read_in_too_many_ways_are_refused(tmp_path: Path) -> None:
    map_ = parse_map(_many(10), "many.toml")
    names = {f"{'.'.join(['xx'] * 9)}.x{at}": (1,) for at in range(3000)}
    tensors = Checkpoint(tmp_path / "x", numbered(**names)).tensors
    with pytest.raises(LimitError, match="too ambiguous"):
        apply_map(map_, tensors, target="b")


def test_indices_of_other_names_are_one_way_of_reading(tmp_path: Path) -> None:
    """Templates that differ in what they call an index are compared with a name at once."""
    text = "".join(
        f'[[rule]]\na = "{{i{at}}}.{{j{at}}}.x{at}"\nb = "y{at}.{{i{at}}}.{{j{at}}}"\n' for at in range(1500)
    )
    tensors = Checkpoint(tmp_path / "x", numbered(**{f"p.{at}.x{at}": (1,) for at in range(1500)})).tensors
    assert len(apply_map(parse_map(text, "many.toml"), tensors, target="b").tensors) == 1500


def test_what_goes_before_what_is_bounded_too() -> None:
    assert len(precedences(parse_map(_many(4), "many.toml"))) == 3**4 - 2**4
    with pytest.raises(LimitError, match="too ambiguous"):
        precedences(parse_map(_many(9), "many.toml"))


def test_the_parts_that_tensors_are_joined_of_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptconv.features.maps.compile.MAX_JOINED", 30)
    map_ = parse_map('[[rule]]\na = "x.{e} : f"\nb = "y.{f} : e"', "many.toml")
    with pytest.raises(LimitError, match="joins more parts of tensors"):
        apply_map(map_, Checkpoint(tmp_path / "x", numbered(**{f"x.{e}": (6,) for e in range(6)})).tensors, target="b")


def test_names_that_differ_in_numbers_alone_are_compared_with_the_templates_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, walks = Templates.find, []

    def counted(self: Templates, parts: Sequence[str], wide: bool) -> Any:
        walks.append(parts)
        return find(self, parts, wide)

    monkeypatch.setattr(Templates, "find", counted)
    map_ = parse_map('[[rule]]\na = "x.{l}.{e}.w : f"\nb = "y.{l} : e f"', "experts.toml")
    for experts in (2, 30):
        walks.clear()
        names = {f"x.{layer}.{e}.w": (3,) for layer in range(4) for e in range(experts)}
        apply_map(map_, Checkpoint(tmp_path / f"{experts}", numbered(**names)).tensors)
        # As either side, as the side that they are of, and what is made once more, on the way back.
        assert len(walks) == 4
