"""Quantized weights beside others: equal, reproduced, or how many steps apart, and where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from features.quantized.dialects import QUANTIZED
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.features.diff.difference import Difference, TensorDifference
from ckptconv.features.diff.showing import overview, page_of
from ckptconv.features.quantized.options import ROUNDING_WAYS
from ckptconv.features.quantized.steps import index
from ckptconv.options.table import OPTIONS

# The ways that can be told from the codes, and those of them that have scales of blocks in rows.
TOLD = [way for way in ROUNDING_WAYS if not way.startswith("nvfp4")]
IN_BLOCKS = [way for way in TOLD if way not in ("fp8-dynamic", "mxfp4")]
LAYER = "model.layers.{}.mlp.{}_proj.weight"
NAMES = [LAYER.format(layer, part) for layer in range(2) for part in ("gate", "up")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("steps") / "model"
    here.mkdir()
    random = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(160, 288, generator=random) * (1 + at) for at, name in enumerate(NAMES)}
    # A step of training later.
    later = {
        name: weight * (1 + 0.02 * torch.randn(weight.shape, generator=random)) for name, weight in weights.items()
    }
    for where, tensors in ((here, weights), (here.parent / "later", later)):
        where.mkdir(exist_ok=True)
        tensors["model.norm.weight"] = torch.ones(4)
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, where / "model.safetensors")
        (where / "config.json").write_text("{}")
    for way in ROUNDING_WAYS:
        ckptconv.convert(here, here.parent / way, quantize=way)
    return here


def compared(one: Path, other: Path, **options: Any) -> tuple[Difference, dict[str, TensorDifference]]:
    found = ckptconv.diff(one, other, dequantize=True, **options)
    return found, {tensor.name: tensor for tensor in found.tensors}


def test_an_option_for_one_of_the_sides_is_not_said_to_have_no_effect(model: Path) -> None:
    def idle(one: Path, other: Path) -> list[str]:
        return [warning for warning in compared(one, other)[0].warnings if "--dequantize has no effect" in warning]

    quantized = model.parent / "mxfp8"
    assert idle(model, quantized) == idle(quantized, model) == idle(quantized, quantized) == []
    assert len(idle(model, model.parent / "later")) == 2


def test_a_release_that_was_quantized_of_it_is_reproduced(model: Path) -> None:
    for way in TOLD:
        for pair in ((model, model.parent / way), (model.parent / way, model)):
            found, tensors = compared(*pair)
            told = found.quantization
            assert told is not None
            assert (told.tensors, told.reproduced, told.beyond, told.equal) == (4, 4, 0, 0), way
            assert told.scales == 4 * {"fp8-dynamic": 160}.get(way, 2 * 3 if "block" in way else 160 * 9), way
            # The largest number of a group of int4 may be one step beyond the largest code.
            assert 0.49 < told.largest <= (1.02 if way == "int4-g32" else 0.5 + 2**-16), way
            assert 0.2 < told.mean < 0.26, way
            steps = tensors[NAMES[0]].steps
            assert steps is not None
            assert (steps.reproduced, steps.scales_differ) == (True, 0), way
            assert (steps.first is None) == (way != "int4-g32"), way
            assert steps.side == "ab"[pair[0] is model], way


def test_weights_of_codes_are_equal_to_what_was_made_of_them(model: Path, tmp_path: Path) -> None:
    ckptconv.convert(model.parent / "mxfp8", tmp_path / "export", dequantize=True)
    found, tensors = compared(model.parent / "mxfp8", tmp_path / "export")
    assert found.equal
    assert found.quantization is not None
    assert (found.quantization.equal, found.quantization.largest) == (4, 0)
    assert all(tensor.steps is None for tensor in tensors.values())
    ckptconv.convert(model.parent / "fp8-block-ue8m0", tmp_path / "mx", requantize="mxfp8")
    found, _ = compared(model.parent / "fp8-block-ue8m0", tmp_path / "mx")
    assert found.equal


def test_a_tolerance_changes_neither_steps_nor_what_is_equal_bit_for_bit(model: Path) -> None:
    pair = model, model.parent / "fp8-block"
    exact, tensors = compared(*pair)
    for tolerance in ({"atol": 100.0}, {"rtol": 2.0}, {"atol": 1e-3, "tolerance": "numpy"}):
        found, tolerated = compared(*pair, **tolerance)
        assert found.equal == (found.atol != 1e-3)
        assert found.quantization == exact.quantization
        assert {name: tensor.steps for name, tensor in tolerated.items()} == {
            name: tensor.steps for name, tensor in tensors.items()
        }
    same = ckptconv.diff(pair[1], pair[1], dequantize=True, atol=1.0).quantization
    assert same is not None
    assert (same.equal, same.largest) == (4, 0)


@pytest.mark.parametrize("rule", ["exponent", "largest"])
def test_mxfp4_of_either_rule_is_reproduced(rule: str, model: Path, tmp_path: Path) -> None:
    shutil.copytree(QUANTIZED / "ct-mxfp4", tmp_path / "q")
    weight = load_file(model / "model.safetensors")[NAMES[0]]
    groups = weight.double().unflatten(-1, (-1, 32))
    most = groups.abs().amax(-1)
    exponent = (torch.frexp(most)[1] - 3 if rule == "exponent" else torch.log2(most / 6).ceil()).double()
    number = groups / torch.exp2(exponent)[..., None]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    # No number of bfloat16 over a power of two is rounded; ties go to the even code.
    distance = (number.abs()[..., None] - values).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    code = (nearest * (2 - torch.arange(8) % 2)).argmax(-1) + 8 * torch.signbit(number)
    pairs = code.flatten(-2).unflatten(-1, (-1, 2))
    tensors = {
        "a.weight_packed": (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8),
        "a.weight_scale": (exponent + 127).to(torch.uint8),
    }
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    save_file({"a.weight": weight}, tmp_path / "w.safetensors")
    found, every = compared(tmp_path / "w.safetensors", tmp_path / "q")
    told, steps = found.quantization, every["a.weight"].steps
    assert told is not None
    assert steps is not None
    assert (told.reproduced, told.beyond, told.scales) == (1, 0, 160 * 9)
    # Numbers beyond the largest code become that.
    assert (steps.largest > 0.5) == (rule == "exponent")


# --------------------------------------------------------------------------------------------------- planted faults


def a_scale_of_another_block(tensors: dict[str, torch.Tensor], codes: str, scale: str) -> None:
    tensors[scale][0, 1] = tensors[scale][1, 2] if tensors[scale][1, 2] != tensors[scale][0, 1] else 3


def halves_swapped(tensors: dict[str, torch.Tensor], codes: str, scale: str) -> None:
    tensors[codes] = torch.cat([tensors[codes][80:], tensors[codes][:80]])


def one_code(tensors: dict[str, torch.Tensor], codes: str, scale: str) -> None:
    bits = tensors[codes].view(torch.uint8)
    bits[7, 11] ^= 1 << 4


def gate_and_up_exchanged(tensors: dict[str, torch.Tensor], codes: str, scale: str) -> None:
    for name in (codes, scale):
        other = name.replace("gate", "up")
        tensors[name], tensors[other] = tensors[other], tensors[name]


FAULTS: dict[Callable[..., None], set[str]] = {
    a_scale_of_another_block: {NAMES[0]},
    halves_swapped: {NAMES[0]},
    one_code: {NAMES[0]},
    gate_and_up_exchanged: {*NAMES[:2]},
}


def test_a_fault_is_found_and_counted_and_located(model: Path, tmp_path: Path) -> None:
    for fault, names in FAULTS.items():
        for way in IN_BLOCKS:
            case = (fault.__name__, way)
            source = model.parent / way
            tensors = load_file(source / "model.safetensors")
            suffixes = ("_packed", "_scale") if way == "int4-g32" else ("", "_scale_inv")
            fault(tensors, *(NAMES[0] + suffix for suffix in suffixes))
            (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
            save_file(tensors, tmp_path / "model.safetensors")
            found, every = compared(model, tmp_path)
            assert found.quantization is not None
            assert found.quantization.beyond == len(names), case
            assert found.quantization.reproduced == 4 - len(names), case
            assert {name for name, tensor in every.items() if tensor.steps and not tensor.steps.reproduced} == names
            steps = every[NAMES[0]].steps
            assert steps is not None
            assert not steps.reproduced, case
            assert steps.largest > 0.5, case
            if fault is one_code:
                where = [7, 11]
                assert steps.scales_differ == 0, case
                assert way == "int4-g32" or (steps.beyond, steps.first, steps.worst) == (1, where, where), case
            if fault is a_scale_of_another_block:
                assert steps.scales_differ == 1, case
                assert steps.first is not None
                if way != "int4-g32":
                    assert steps.first[1] // (128 if "block" in way else 32) == 1, case
                    assert steps.beyond <= (128 * 128 if "block" in way else 32), case


def test_another_step_of_training_is_further_than_half_a_step(model: Path) -> None:
    for way in TOLD:
        found, every = compared(model.parent / "later", model.parent / way)
        assert found.quantization is not None
        assert (found.quantization.reproduced, found.quantization.beyond) == (0, 4), way
        for name in NAMES:
            steps = every[name].steps
            assert steps is not None
            assert 0.5 < steps.largest < 4, (way, name)
            assert steps.scales_differ or way == "fp8-block-ue8m0", (way, name)


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
def test_weights_that_a_map_joins_are_reproduced_too(model: Path, tmp_path: Path) -> None:
    rules = tmp_path / "my.toml"
    there = ", ".join(f'"{LAYER.format("{l}", part)} : a b"' for part in ("gate", "up"))
    rules.write_text(f"""
keep = ["model.norm.weight"]
[[rule]]
left = "model.layers.{{l}}.fused.weight : (a + a) b"
right = [{there}]
""")
    for fault in (False, True):
        weights = load_file(model / "model.safetensors")
        if fault:
            weights[NAMES[1]][5] *= 1.5
        fused = {
            f"model.layers.{n}.fused.weight": torch.cat([weights[each] for each in NAMES[2 * n : 2 * n + 2]])
            for n in range(2)
        }
        save_file({**fused, "model.norm.weight": weights["model.norm.weight"]}, tmp_path / "fused.safetensors")
        for way in ("fp8-block", "int4-g32"):
            found, every = compared(model.parent / way, tmp_path / "fused.safetensors", map=rules)
            assert found.quantization is not None
            expected = (1, 1) if fault else (2, 0)
            assert (found.quantization.reproduced, found.quantization.beyond) == expected, (way, fault)
            others = {tensor.name for tensor in every.values() if tensor.steps and not tensor.steps.reproduced}
            assert others == ({"model.layers.0.fused.weight"} if fault else set()), (way, fault)


# --------------------------------------------------------------------------------------------------------- arithmetic


def test_codes_are_one_step_apart_and_what_lies_between_is_divided_evenly() -> None:
    every = {
        codes: torch.arange(count, dtype=torch.uint8).view(getattr(torch, codes)).double().numpy()
        for codes, count in (("float8_e4m3fn", 127), ("float8_e5m2", 124))
    }
    every["e2m1"] = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    every["quarters"] = np.arange(8) / 4
    for codes, values in every.items():
        count = len(values)
        assert (index(codes, values) == np.arange(count)).all(), codes
        assert (index(codes, -values) == -np.arange(count)).all(), codes
        between = values[:-1] + 0.25 * np.diff(values)
        assert np.allclose(index(codes, between), np.arange(count - 1) + 0.25), codes
    assert index("int", np.array([2.25])) == 2.25


def test_steps_are_those_of_each_format(tmp_path: Path) -> None:
    # The largest code, that many of its own last place from 0.
    largest = {"ct-nvfp4": 3 / 64, "gpt-oss-mxfp4": 3 / 64, "deepseek-v4": 15 / 64}
    others = ("ct-pack-int4-g128-asym", "gptq", "awq", "ct-pack-int3")
    for name in (*largest, *others):
        source, output = QUANTIZED / name, tmp_path / name
        ckptconv.convert(source, output, dequantize=True, dtype="fp32")
        tensors = load_file(output / "model.safetensors")
        moved = {each: tensor * (1 + 2**-6) if tensor.dim() > 1 else tensor for each, tensor in tensors.items()}
        save_file(moved, tmp_path / "moved.safetensors")
        found, _ = compared(source, tmp_path / "moved.safetensors", dtype="fp32")
        told = found.quantization
        assert told is not None
        # So little changes no code of four bits.
        assert told.tensors == told.within_half_step + told.reproduced > 0, name
        if name in largest:
            assert told.largest == pytest.approx(largest[name], rel=1e-3), name
        assert 0 < told.mean < told.largest < 0.5, name


def test_tables_have_no_steps(tmp_path: Path) -> None:
    ckptconv.convert(QUANTIZED / "bnb-nf4", tmp_path / "x", dequantize=True, dtype="fp32")
    tensors = load_file(tmp_path / "x" / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / "moved.safetensors")
    found, _ = compared(QUANTIZED / "bnb-nf4", tmp_path / "moved.safetensors", dtype="fp32")
    assert found.quantization is not None
    assert found.quantization.unmeasured == found.quantization.tensors > 0


def test_a_nan_on_the_other_side_is_beyond(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[NAMES[1]][3, 4] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    _, every = compared(model.parent / "mxfp8", tmp_path / "model.safetensors")
    steps = every[NAMES[1]].steps
    assert steps is not None
    assert (steps.not_finite, steps.beyond, steps.first, steps.reproduced) == (1, 1, [3, 4], False)


# ----------------------------------------------------------------------------------------------------------- reports


def test_it_is_in_the_text_the_page_and_the_json(model: Path) -> None:
    found, _ = compared(model, model.parent / "fp8-block")
    text = "\n".join("".join(span.text for span in line) for line in overview(found))
    assert (
        "of 4 quantized weights with 24 scales, 4 reproduced; the sides differ by at most 0.5 steps of the codes"
        in text
    )
    assert "reproduced" in page_of(found)
    told = json.loads(found.to_json())
    assert told["quantization"]["reproduced"] == 4
    row = next(each for each in told["tensors"] if each["name"] == NAMES[0])
    assert row["steps"]["largest"] <= 0.5 + 2**-16
    assert ckptconv.diff(model, model).quantization is None


@pytest.mark.parametrize("case", ["deepseek-v4", "ct-nvfp4", "gptq", "gpt-oss-mxfp4"])
def test_quantized_weights_are_equal_to_what_is_made_of_them(case: str, tmp_path: Path) -> None:
    source = QUANTIZED / case
    ckptconv.convert(source, tmp_path / "plain", dequantize=True)
    assert ckptconv.diff(source, tmp_path / "plain", dequantize=True).equal


def test_codes_beside_weights_are_told_to_be_compared_as_weights(model: Path) -> None:
    def hints(a: Path, b: Path, **options: Any) -> list[str]:
        return [hint for hint in ckptconv.diff(a, b, **options).hints if "--dequantize" in hint]

    fp8, mxfp4 = model.parent / "fp8-block", model.parent / "mxfp4"
    assert hints(fp8, model)[0].startswith(f"A has quantized weights, such as '{NAMES[0]}'")
    assert hints(model, fp8)[0].startswith("B has quantized weights")
    assert hints(fp8, mxfp4)[0].startswith("A and B have quantized weights")
    assert hints(fp8, fp8) == hints(model, model) == hints(fp8, model, dequantize=True) == []
