"""Rules that compute values: each element by one operation with a number, in float32 or float64, and rounded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED
from checkpoints import assert_same
from effort import every
from safetensors.torch import load_file, save_file

from ckptconv import convert
from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.features.maps.chosen import ChosenMap
from ckptconv.features.maps.file import parse_map
from ckptconv.features.maps.states import apply_to_states
from ckptconv.outputs.kinds import NAMED
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Zeros

RULE = '[[rule]]\nours = "{n}.w : a b"\nhf = "{n}.weight : b a"\n'
VALUES = 'values.hf = "ours * sqrt(a)"\nvalues.ours = "hf * (1 / sqrt(a))"\n'
HALF, SINGLE, DOUBLE = (torch.bfloat16, torch.float16), torch.float32, torch.float64


def weights(dtype: torch.dtype) -> torch.Tensor:
    """Numbers at random, and those that are none or have no finite product."""
    made = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    made[0, :4] = torch.tensor([math.nan, math.inf, -0.0, torch.finfo(dtype).max], dtype=dtype)
    return made


def equal(one: torch.Tensor, other: torch.Tensor) -> None:
    """Fail unless two tensors have the same bits, where they are numbers."""
    same = other.clone()
    if other.is_floating_point():
        same[other.isnan() & one.isnan()] = one[other.isnan() & one.isnan()]
    assert_same({"w": one}, {"w": same})


def single(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float32)


def written(place: Path, values: str, of: torch.dtype, **options: Any) -> torch.Tensor:
    """What a rule with these values makes of `weights`."""
    (place / "m.toml").write_text(RULE + values)
    save_file({"x.w": weights(of)}, place / "x.safetensors")
    convert(place / "x.safetensors", place / "out.safetensors", map=place / "m.toml", **VERIFIED, **options)
    return load_file(place / "out.safetensors")["x.weight"]


@every("dtype", [*HALF, SINGLE, DOUBLE])
@every(
    "operation, number",
    [
        *(("*", "sqrt(a)"), ("/", "sqrt(a)"), ("*", "(1 / sqrt(a * b))"), ("+", "1"), ("-", "a"), ("/", "(a + 3)")),
        *(("*", "bfloat16(sqrt(a))"), ("/", "bfloat16( (1 / sqrt(a * b)) )"), ("+", "bfloat16(a / 7 * 257)")),
    ],
)
def test_a_value_is_what_torch_computes(operation: str, number: str, dtype: torch.dtype, tmp_path: Path) -> None:
    numbers = {"sqrt(a)": math.sqrt(7), "(1 / sqrt(a * b))": 1 / math.sqrt(35), "1": 1.0, "a": 7.0, "(a + 3)": 10.0}
    short = {"sqrt(a)": math.sqrt(7), " (1 / sqrt(a * b)) ": 1 / math.sqrt(35), "a / 7 * 257": 257.0}
    rounded = {f"bfloat16({text})": single(value).bfloat16().float() for text, value in short.items()}
    by = {**{text: single(value) for text, value in numbers.items()}, **rounded}[number]
    by = by.to(DOUBLE if dtype == DOUBLE else SINGLE)
    given = weights(dtype).to(by.dtype)
    computed = {"*": given * by, "/": given / by, "+": given + by, "-": given - by}[operation].to(dtype)
    values = f'values.hf = "ours {operation} {number}"\nvalues.ours = "hf * 2"\n'
    equal(written(tmp_path, values, dtype).T.contiguous(), computed)


def test_a_number_that_is_not_one_keeps_its_bits(tmp_path: Path) -> None:
    # The last two signal: a processor makes others of them where it computes.
    bits = torch.tensor([[0x7FC00123, -0x3FFEDD, 0x7F800123, -0x7FFEDD]], dtype=torch.int32)
    (tmp_path / "m.toml").write_text(RULE + VALUES)
    save_file({"x.w": bits.view(SINGLE)}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors", map=tmp_path / "m.toml", **VERIFIED)
    equal(load_file(tmp_path / "y.safetensors")["x.weight"].view(torch.int32).T.contiguous(), bits)


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_the_way_back_computes_the_other_value(tmp_path: Path) -> None:
    there = written(tmp_path, VALUES, SINGLE)
    convert(tmp_path / "out.safetensors", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)["x.w"]
    equal(back, (there.T * single(1 / math.sqrt(7))).contiguous())


def test_a_cast_rounds_what_was_computed(tmp_path: Path) -> None:
    computed = (weights(SINGLE) * single(math.sqrt(7))).to(torch.bfloat16)
    equal(written(tmp_path, VALUES, SINGLE, dtype="bfloat16").T.contiguous(), computed)


def test_padding_stays_zero(tmp_path: Path) -> None:
    rule = '[[rule]]\nours = "w : (v + _) h"\nhf = "weight : v h"\nvalues.ours = "hf + 1"\nvalues.hf = "ours - 1"\n'
    (tmp_path / "m.toml").write_text(rule)
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors", map=tmp_path / "m.toml", size={"_": 1})
    assert load_file(tmp_path / "y.safetensors")["w"].tolist() == [[2, 2], [2, 2], [0, 0]]


def test_integers_are_not_computed(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(RULE + VALUES)
    save_file({"x.w": torch.ones(2, 2, dtype=torch.int32)}, tmp_path / "x.safetensors")
    with pytest.raises(UsageError, match=r"m\.toml:1, rule 1: it computes 'ours \* sqrt\(a\)', .* int32"):
        convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors", map=tmp_path / "m.toml")


def test_a_size_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"needs heads, whose size is not known") as refused:
        written(tmp_path, VALUES.replace("sqrt(a)", "sqrt(heads)"), SINGLE)
    assert refused.value.hint == "Give --size heads=NUMBER."


def test_a_number_that_is_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'a - 7' is 0"):
        written(tmp_path, VALUES.replace("sqrt(a)", "(a - 7)", 1).replace("* (a - 7)", "* a - 7"), SINGLE)


@every("value, warnings", [(math.inf, 0), (torch.finfo(SINGLE).max, 1)])
def test_a_value_that_becomes_infinite_is_told_and_one_that_was_is_not(
    value: float, warnings: int, tmp_path: Path
) -> None:
    (tmp_path / "m.toml").write_text(RULE + VALUES)
    save_file({"x.w": torch.full((7, 5), value)}, tmp_path / "x.safetensors")
    report = convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors", map=tmp_path / "m.toml")
    assert len([warning for warning in report.warnings if "became infinite" in warning]) == warnings


def test_states_of_an_optimizer_are_not_computed(tmp_path: Path) -> None:
    tensors = {"x.w": Zeros(DTYPES["float32"], (7, 5))}
    states = {"x.w": {"exp_avg": tensors["x.w"]}}
    chosen = ChosenMap(parse_map(RULE + VALUES, "m.toml"))
    with pytest.raises(
        UnsupportedError,
        match=r"The map m\.toml computes new values for 'x\.weight', and has no rules for the optimizer",
    ):
        apply_to_states(chosen, states, [{"params": ["x.w"]}])


@every(
    "values, why",
    [
        ("values = 3", "but a string for ours and a string for hf were expected"),
        ('values.hf = "ours * 2"', "but a string for ours and a string for hf were expected"),
        ('values.hf = "ours * 2"\nvalues.ours = 3', "but a string for ours and a string for hf were expected"),
        ('values.hf = "hf * 2"\nvalues.ours = "hf * 2"', "begins with hf, not with ours"),
        ('values.hf = "ours ** 2"\nvalues.ours = "hf * 2"', "a number or a name is expected at '*'"),
        ('values.hf = "sqrt(a)"\nvalues.ours = "hf * 2"', "is not a side, an operation and a number"),
        ('values.hf = "ours * sqrt(a"\nvalues.ours = "hf * 2"', "is not expected after a value"),
    ],
)
def test_a_text_that_is_none_is_refused(values: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_map(RULE + values, "m.toml")
    assert why in refused.value.message
    assert refused.value.message.startswith("m.toml:1, rule 1, values")
