"""A rule that is `copied`: one tensor of a side is each of those of the other, which are equal on the way back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cells import verified_here
from effort import every
from features.maps.mapping import Checkpoint, same, values
from safetensors.torch import load_file, save_file

from ckptconv import convert
from ckptconv.errors import CorruptError, UsageError
from ckptconv.features.maps.compile import apply_map
from ckptconv.features.maps.file import parse_map

MAP = """
[[rule]]
copied = true
joined = "layers.{l}.qkv.in"
apart = ["layers.{l}.q.in", "layers.{l}.k.in"]
[[rule]]
joined = "layers.{l}.qkv.out : (q + k) r"
apart = ["layers.{l}.q.out : q r", "layers.{l}.k.out : k r"]
[sizes]
q = 4
k = 2
"""
QKV = {
    f"layers.{layer}.qkv.{part}": torch.randn(shape)
    for layer in (0, 1)
    for part, shape in (("in", (2, 8)), ("out", (6, 2)))
}
APART = {
    name: tensor
    for layer in (0, 1)
    for name, tensor in (
        (f"layers.{layer}.q.in", QKV[f"layers.{layer}.qkv.in"]),
        (f"layers.{layer}.k.in", QKV[f"layers.{layer}.qkv.in"].clone()),
        (f"layers.{layer}.q.out", QKV[f"layers.{layer}.qkv.out"][:4]),
        (f"layers.{layer}.k.out", QKV[f"layers.{layer}.qkv.out"][4:]),
    )
}


def the_map(place: Path) -> Path:
    (place / "map.toml").write_text(MAP)
    return place / "map.toml"


def held(path: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


def saved(tensors: dict[str, torch.Tensor], path: Path) -> Path:
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    return path


def test_each_copy_is_stored_whole_and_they_are_one_again_on_the_way_back(tmp_path: Path) -> None:
    joined, apart, back = saved(QKV, tmp_path / "a.safetensors"), tmp_path / "b.safetensors", tmp_path / "c.safetensors"
    convert(joined, apart, map=the_map(tmp_path))
    assert held(apart) == held(saved(APART, tmp_path / "expected.safetensors"))
    convert(apart, back, map=the_map(tmp_path))
    assert held(back) == held(joined)
    verified_here(joined, apart)
    verified_here(apart, back)


def test_copies_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    changed = {**APART, "layers.1.k.in": APART["layers.1.k.in"] + 1}
    source = saved(changed, tmp_path / "a.safetensors")
    with pytest.raises(CorruptError, match=r"'layers\.1\.qkv\.in' is stored twice, .*different values"):
        convert(source, tmp_path / "out", map=the_map(tmp_path))
    assert not (tmp_path / "out").exists()


@every("change", [torch.Tensor.double, torch.Tensor.t])
def test_copies_of_another_dtype_or_shape_are_refused_before_anything_is_read(
    change: type[torch.Tensor], tmp_path: Path
) -> None:
    source = saved({**APART, "layers.0.k.in": change(APART["layers.0.k.in"])}, tmp_path / "a.safetensors")
    with pytest.raises(CorruptError, match=r"needs 'layers\.0\.q\.in' and 'layers\.0\.k\.in' to be equal, but"):
        convert(source, tmp_path / "out", map=the_map(tmp_path))


def test_a_copy_that_is_missing_is_named(tmp_path: Path) -> None:
    source = saved({name: each for name, each in APART.items() if name != "layers.0.k.in"}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match=r"the rule also needs 'layers\.0\.k\.in', which is missing"):
        convert(source, tmp_path / "out", map=the_map(tmp_path))


@every(
    "rule, told",
    [
        (
            'one = ["a", "b"]\nother = ["c", "d"]',
            "at least one side must have exactly one name, and no name has axes",
        ),
        (
            'one = "a : x"\nother = ["c : x", "d : x"]',
            "at least one side must have exactly one name, and no name has axes",
        ),
        ('one = "a"\nother = ["c", "d"]\nvalues = {one = "other + 1", other = "one - 1"}', "cannot have values"),
        ('one = "a.{l}"\nother = ["c.{l}", "d"]', "must be in every name"),
    ],
)
def test_what_cannot_be_copied_is_refused_in_the_map(rule: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_map(f"[[rule]]\ncopied = true\n{rule}", "x.toml")
    assert told in f"{refused.value.message} {refused.value.hint}"


def test_the_word_has_two_values() -> None:
    with pytest.raises(UsageError, match="copied is 1, but true or false was expected"):
        parse_map('[[rule]]\ncopied = 1\none = "a"\nother = ["b", "c"]', "x.toml")


def test_optimizer_states_are_compared_too(tmp_path: Path) -> None:
    from ckptconv.features.maps.chosen import ChosenMap
    from ckptconv.features.maps.states import apply_to_states

    tensors = Checkpoint(tmp_path / "apart", {name: each.numpy() for name, each in APART.items()}).tensors
    states = {name: {"exp_avg": tensor} for name, tensor in tensors.items()}
    restated = apply_to_states(ChosenMap(parse_map(MAP, "x.toml")), states, [{"params": [*states]}])
    assert {name for name, *_ in restated.equal} == {f"layers.{layer}.qkv.in.exp_avg" for layer in (0, 1)}
    joined = {name: state["exp_avg"] for name, state in restated.states.items()}
    same(values(joined), values(apply_map(parse_map(MAP, "x.toml"), tensors).tensors))
