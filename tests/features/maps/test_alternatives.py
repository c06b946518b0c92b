"""Alternatives of a rule: names of several releases are read, those of the first are written; and rules that share a
name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from effort import every
from safetensors.numpy import save_file

from ckptconv import convert
from ckptconv.errors import UsageError
from ckptconv.features.maps.compile import Applied, apply_map
from ckptconv.features.maps.file import parse_map
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Zeros

RELEASES = """
[[rule]]
ours = "blocks.{l}.experts.w{e} : f h | blocks.{l}.moe.{e}.w : f h | blocks.{l}.moe.w : e f h"
hf = "layers.{l}.{e}.w : f h"

[[rule]]
ours = "head | output"
hf = "lm_head"
"""

MIXED = """
[[rule]]
ours = ["{l}.norm : h", "{l}.dense : f h"]
hf = ["{l}.post_norm : h", "{l}.mlp : f h"]

[[rule]]
ours = ["{l}.moe_norm : h", "{l}.router : e h"]
hf = ["{l}.post_norm : h", "{l}.gate : e h"]
"""


def applied(text: str, shapes: dict[str, Sequence[int]], target: str = "") -> Applied:
    tensors = {name: Zeros(DTYPES["int16"], tuple(shape)) for name, shape in shapes.items()}
    return apply_map(parse_map(text, "test.toml"), tensors, target=target)


@every(
    "shapes",
    [
        {"blocks.0.experts.w0": (2, 3), "blocks.0.experts.w1": (2, 3), "head": (4,)},
        {"blocks.0.moe.0.w": (2, 3), "blocks.0.moe.1.w": (2, 3), "output": (4,)},
        {"blocks.0.moe.w": (2, 2, 3), "head": (4,)},
    ],
    ids=["first", "second", "third"],
)
def test_each_alternative_is_read(shapes: dict[str, Sequence[int]]) -> None:
    made = applied(RELEASES, shapes).tensors
    assert {name: tensor.shape for name, tensor in made.items()} == {
        "layers.0.0.w": (2, 3),
        "layers.0.1.w": (2, 3),
        "lm_head": (4,),
    }


def test_the_first_alternative_is_written() -> None:
    made = applied(RELEASES, {"layers.0.0.w": (2, 3), "layers.0.1.w": (2, 3), "lm_head": (4,)}).tensors
    assert [*made] == ["blocks.0.experts.w0", "blocks.0.experts.w1", "head"]


@every("written", ["blocks.0.experts.w0 head", "blocks.0.moe.0.w output", "blocks.0.moe.w head", "head"])
def test_alternatives_that_a_reference_has_are_written(written: str) -> None:
    source = {"layers.0.0.w": (2, 3), "layers.0.1.w": (2, 3), "lm_head": (4,)}
    tensors = {name: Zeros(DTYPES["int16"], shape) for name, shape in source.items()}
    map_ = parse_map(RELEASES, "test.toml")
    shapes: dict[str, Sequence[int]] = {name: (4,) if "." not in name else (2, 3) for name in written.split()}
    shapes |= {"blocks.0.moe.w": (2, 2, 3)} if "blocks.0.moe.w" in shapes else {}
    made = apply_map(map_, tensors, shapes=shapes)
    assert {*made.tensors} >= {*shapes}
    assert [name in made.tensors for name in made.alternative or ()] == [True, False]
    assert apply_map(map_, made.tensors).tensors.keys() == source.keys()


def test_a_name_that_was_not_written_is_told_if_there_was_a_choice() -> None:
    assert applied(RELEASES, {"lm_head": (4,)}).alternative == ("head", "output")
    assert applied(RELEASES, {"head": (4,)}).alternative is None
    assert applied(MIXED, {"0.post_norm": (3,), "0.mlp": (2, 3)}).alternative is None


def test_the_report_names_a_name_that_was_not_written(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(RELEASES)
    save_file({"lm_head": np.ones(4, np.float32)}, tmp_path / "a.safetensors")
    report = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", map=str(tmp_path / "my.toml"))
    assert (
        "map my.toml: names of hf → names of ours, such as 'head' instead of the map's alternative 'output'"
        in "\n".join(report.notes)
    )
    report = convert(tmp_path / "b.safetensors", tmp_path / "c.safetensors", map=str(tmp_path / "my.toml"))
    assert "map my.toml: names of ours → names of hf" in report.notes


TURNS = """
[[rule]]
ours = "layers_{l}.w : h f | layers.layers_0.w : h l f | layers.layers_1.w : h l f | rest.layers_{l}.w : h f"
hf = "{l}.w : f h | {2 l}.w : f h | {2 l + 1}.w : f h | {l + r}.w : f h"

[sizes]
r = "num_layers // 2 * 2"
"""


def test_an_index_that_an_alternative_counts_otherwise_is_written_as_the_first_counts() -> None:
    """Layers that are stacked by their kind, and those that are left over, are the numbered ones."""
    stacked = {"layers.layers_0.w": (5, 2, 3), "layers.layers_1.w": (5, 2, 3), "rest.layers_0.w": (5, 3)}
    made = apply_map(
        parse_map(TURNS, "test.toml"),
        {name: Zeros(DTYPES["int16"], shape) for name, shape in stacked.items()},
        config={"num_layers": 5},
    ).tensors
    assert {name: tensor.shape for name, tensor in made.items()} == {f"{at}.w": (3, 5) for at in range(5)}
    numbered = applied(TURNS, {f"{at}.w": (3, 5) for at in range(5)}).tensors
    assert {name: tensor.shape for name, tensor in numbered.items()} == {f"layers_{at}.w": (5, 3) for at in range(5)}
    with pytest.raises(UsageError, match=r"the size of r in \{l \+ r\} is not known"):
        applied(TURNS, stacked)


def test_what_two_alternatives_would_make_is_refused() -> None:
    with pytest.raises(UsageError, match="'lm_head', but so would 'head'"):
        applied(RELEASES, {"head": (4,), "output": (4,)})


def test_tensors_of_a_rule_have_as_many_alternatives() -> None:
    with pytest.raises(UsageError, match="rule 1: tensors have 2, 3 alternatives"):
        applied('[[rule]]\na = ["x | y", "p | q | r"]\nb = ["s", "t"]', {"x": (1,)})


def test_a_name_of_two_rules_belongs_to_the_one_that_is_complete() -> None:
    hf = {"0.post_norm": (3,), "0.mlp": (2, 3), "1.post_norm": (3,), "1.gate": (4, 3)}
    assert [*applied(MIXED, hf, "ours").tensors] == ["0.norm", "0.dense", "1.moe_norm", "1.router"]


@every("more", [{}, {"0.mlp": (2, 3), "0.gate": (4, 3)}], ids=["none", "both"])
def test_a_name_of_two_rules_is_refused_if_none_or_both_are_complete(more: dict[str, Sequence[int]]) -> None:
    with pytest.raises(UsageError, match=r"Several entries .* match the name '0\.post_norm'"):
        applied(MIXED, {"0.post_norm": (3,), **more}, "ours")
