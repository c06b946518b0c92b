"""Names whose indices are multiples, as of two kinds of layers in turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from effort import every
from features.maps.mapping import Checkpoint, numbered, same, values

from ckptconv.errors import CorruptError, UsageError
from ckptconv.features.maps.compile import apply_map
from ckptconv.features.maps.file import parse_map

STACKED = """
[[rule]]
ours = ["local : l h", "global : l h"]
hf = ["layers.{2 l}.w : h", "layers.{2 l + 1}.w : h"]
"""
NUMBERED = """
[[rule]]
ours = ["layer.{l}.local", "layer.{l}.global"]
hf = ["layers.{2 l}.w", "layers.{2 l + 1}.w"]
"""


@every("text, names", [(STACKED, {"local": (3, 4), "global": (3, 4)}), (
    NUMBERED, {f"layer.{at}.{kind}": (4,) for at in range(3) for kind in ("local", "global")}
)])  # fmt: skip
def test_two_kinds_of_layers_take_turns(text: str, names: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    given = Checkpoint(tmp_path / "x", numbered(**names))
    there = apply_map(parse_map(text, "m.toml"), given.tensors)
    made = values(there.tensors)
    rows = [row for array in given.arrays.values() for row in array.reshape(-1, 4)]
    order = [0, 3, 1, 4, 2, 5] if text == STACKED else range(6)
    same(made, {f"layers.{at}.w": rows[number] for at, number in enumerate(order)})
    same(values(apply_map(parse_map(text, "m.toml"), there.tensors).tensors), given.arrays)


def test_a_layer_that_is_missing_is_named_by_its_number(tmp_path: Path) -> None:
    given = Checkpoint(tmp_path / "x", {f"layers.{at}.w": array for at, array in enumerate(numbered(
        a=(4,), b=(4,), c=(4,), d=(4,), e=(4,), f=(4,)
    ).values()) if at != 3})  # fmt: skip
    with pytest.raises(CorruptError, match=r"'layers\.3\.w' is missing, but the stack goes up to l = 2"):
        apply_map(parse_map(STACKED, "m.toml"), given.tensors)


@every("index", ["{0 l}", "{2l}", "{-2 l}", "{2 l 3}", "{2 3}", "{99999 l}"])
def test_an_index_that_is_none_is_refused(index: str) -> None:
    with pytest.raises(UsageError, match=r"an index is a letter or word in braces, such as {l}, {l \+ 1} or {2 l"):
        parse_map(f'[[rule]]\nours = "a.{index}"\nhf = "b.{index}"\n', "m.toml")
