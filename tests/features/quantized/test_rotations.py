"""Rotations of what modules take and give, undone in weights: beside products in another order; and what is refused.

compressed-tensors' own models are compared by `scripts/formats/rotations.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import VERIFIED
from features.quantized.dialects import Array, nearest, numbers
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.errors import UnsupportedError

SIDE = 4
CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
LINEAR: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "format": "int-quantized", "weights": CHANNELS}},
    "ignore": ["lm_head"],
}
GENERATOR = torch.Generator().manual_seed(5)
# The modules of a model: codes of `a` and `b`, and floats.
TENSORS: dict[str, torch.Tensor] = {
    **{
        f"layers.0.{name}.weight": torch.randint(-9, 9, (8, 12), generator=GENERATOR, dtype=torch.int8)
        for name in ("a", "b")
    },
    **{f"layers.0.{name}.weight_scale": torch.rand(8, 1, generator=GENERATOR) for name in ("a", "b")},
    "layers.0.a.bias": torch.randn(8, generator=GENERATOR),
    "norm.weight": torch.ones(12),
    "lm_head.weight": torch.randn(16, 12, generator=GENERATOR),
}
A, B, BIAS, HEAD = "layers.0.a.weight", "layers.0.b.weight", "layers.0.a.bias", "lm_head.weight"


def matrix(size: int, seed: int, *, signs: bool = True) -> torch.Tensor:
    """Return a matrix that is not symmetric: of signs, as a Hadamard's, or of other numbers."""
    numbers_ = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return torch.where(numbers_ < 0, -1.0, 1.0) if signs else numbers_


def group(*apply: Mapping[str, Any], kind: str = "random-hadamard", **more: Any) -> dict[str, Any]:
    return {"type": kind, "apply": list(apply), "head_dim": None, "precision": "torch.float32", **more}


def entry(location: str, *targets: str, inverse: bool = False, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"location": location, "targets": [*targets], "inverse": inverse, "ignore": [*ignore]}


def rotating(
    place: Path,
    groups: Mapping[str, Any],
    more: Mapping[str, torch.Tensor],
    words: Mapping[str, Any] = LINEAR,
    tensors: Mapping[str, torch.Tensor] = TENSORS,
) -> Path:
    """Write the model with rotations, and return where."""
    place.mkdir()
    save_file({**tensors, **more}, place / "model.safetensors")
    said = {**words, "transform_config": {"config_groups": groups}}
    (place / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": said}))
    return place


def undone(place: Path, *given: Any, **more: Any) -> dict[str, Array]:
    """Return the weights of the model with rotations, as float64."""
    source, out = rotating(place / "in", *given, **more), place / "out"
    ckptconv.convert(source, out, dequantize=True, dtype="fp32", **VERIFIED, fsync=False, copy_config=True)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    return {name: numbers(tensor) for name, tensor in load_file(out / "model.safetensors").items()}


def product(name: str) -> Array:
    codes, scale = (numbers(TENSORS[name + end].float()) for end in ("", "_scale"))
    return nearest(codes * scale, "float32")


def close(one: Array, other: Array) -> bool:
    """Whether two results are sums of the same products, rounded to float32."""
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=2.0**-22, atol=2.0**-22))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("kind", ["random-hadamard", "random-matrix"])
def test_what_a_module_multiplies_its_input_by_is_in_its_weight(kind: str, inverse: bool, tmp_path: Path) -> None:
    """The inverse of a Hadamard matrix is its transpose; that of another is stored."""
    for size, head_dim in ((12, None), (SIDE, SIDE)):
        stored = matrix(size, 1, signs=kind != "random-matrix")
        groups = {"R4": group(entry("input", r"re:.*\.a$", inverse=inverse), kind=kind, head_dim=head_dim)}
        (tmp_path / f"{size}").mkdir()
        made = undone(tmp_path / f"{size}", groups, {"layers.0.a.R4_input.weight": stored})
        turn = numbers(stored) if inverse and kind != "random-matrix" else numbers(stored).T
        whole = np.kron(np.eye(12 // size), turn) / (1 if kind == "random-matrix" else size**0.5)
        assert made.keys() == TENSORS.keys() - {f"{name}_scale" for name in (A, B)}
        assert close(made[A], product(A) @ whole)
        assert np.array_equal(made[B], product(B))
        assert np.array_equal(made[BIAS], numbers(TENSORS[BIAS]))


@pytest.mark.parametrize("inverse", [False, True])
def test_what_a_module_multiplies_its_output_by_is_in_its_weight_and_its_bias(inverse: bool, tmp_path: Path) -> None:
    """All linear modules share the matrix that the first has, on both sides."""
    for number, (size, head_dim) in enumerate(((8, None), (SIDE, SIDE))):
        left, right = matrix(size, 2).double(), matrix(SIDE, 3).bfloat16()
        groups = {
            "v": group(entry("input", "Linear", ignore=("lm_head",)), head_dim=SIDE),
            "u": group(entry("output", "Linear", inverse=inverse, ignore=("re:lm.*",)), head_dim=head_dim),
        }
        stored = {"layers.0.a.u_output.weight": left, "layers.0.a.v_input.weight": right}
        (tmp_path / f"{number}").mkdir()
        made = undone(tmp_path / f"{number}", groups, stored)
        after = np.kron(np.eye(8 // size), numbers(left.T if inverse else left)) / size**0.5
        before = np.kron(np.eye(12 // SIDE), numbers(right).T) / SIDE**0.5
        for name in (A, B):
            assert close(made[name], after.T @ product(name) @ before)
        assert close(made[BIAS], numbers(TENSORS[BIAS]) @ after)
        assert np.array_equal(made[HEAD], numbers(TENSORS[HEAD]))


def test_weights_that_are_not_quantized_are_turned_too(tmp_path: Path) -> None:
    """The report counts them; one that is left of the class Linear is known to be of it."""
    groups = {"v": group(entry("input", "Linear"), head_dim=SIDE)}
    turn = {"lm_head.v_input.weight": matrix(SIDE, 4)}
    assert close(undone(tmp_path, groups, turn)[HEAD], numbers(TENSORS[HEAD]) @ np.kron(np.eye(3), turned(turn)))
    plain = {name: tensor for name, tensor in TENSORS.items() if name.startswith(("norm", "lm"))}
    words = {"quant_method": "compressed-tensors"}
    only = {"v": group(entry("input", "lm_head"), head_dim=SIDE)}
    source = rotating(tmp_path / "plain", only, turn, words, plain)
    report = ckptconv.convert(source, tmp_path / "other", dequantize=True, **VERIFIED, fsync=False)
    assert report.dequantized == {"rotated float32": 1}
    made = load_file(tmp_path / "other" / "model.safetensors")
    assert made[HEAD].dtype == torch.bfloat16
    assert made.keys() == plain.keys()


def turned(stored: Mapping[str, torch.Tensor]) -> Array:
    (only,) = stored.values()
    return numbers(only).T / len(only) ** 0.5


HEAD_INPUT = {"lm_head.v_input.weight": matrix(12, 6)}
A_INPUT, A_OUTPUT = {"layers.0.a.v_input.weight": matrix(12, 6)}, {"layers.0.a.v_output.weight": matrix(8, 6)}
_IN, _OUT = entry("input", "layers.0.a"), entry("output", "layers.0.a")
_OTHER = {**LINEAR, "config_groups": {"group_0": {**LINEAR["config_groups"]["group_0"], "targets": ["re:.*"]}}}
# Rotations, the matrices that are stored, other words of the configuration, and why they are refused.
REFUSED: dict[str, tuple[dict[str, Any], Mapping[str, torch.Tensor], Mapping[str, Any], str]] = {
    "no matrix": ({"v": group(_IN)}, {}, LINEAR, "has 0 matrices of 12 rows"),
    "a matrix of integers": (
        {"v": group(_IN)}, {"layers.0.a.v_input.weight": matrix(12, 6).to(torch.int8)}, LINEAR, "has 0 matrices",
    ),
    "two that others have": (
        {"v": group(_IN)},
        {"layers.0.b.v_input.weight": matrix(12, 6), "lm_head.v_input.weight": matrix(12, 7)}, LINEAR, "has 2 matrices",
    ),
    "one that none has": (
        {"v": group(entry("input", "lm_head"))}, {**HEAD_INPUT, **A_INPUT}, LINEAR, "which none of its modules uses",
    ),
    "other blocks": ({"v": group(_IN, head_dim=5)}, {"x.v_input.weight": matrix(5, 6)}, LINEAR, "blocks of 5"),
    "permuted": ({"v": group(_IN, randomize=True)}, A_INPUT, LINEAR, "permuted"),
    "with a gradient": ({"v": group(_IN, requires_grad=True)}, A_INPUT, LINEAR, "'requires_grad'"),
    "another type": ({"v": group(_IN, kind="givens")}, A_INPUT, LINEAR, "'type'"),
    "another place": ({"v": group(entry("residual", "lm_head"))}, A_INPUT, LINEAR, "'location'"),
    "twice": ({"v": group(_IN, _IN)}, A_INPUT, LINEAR, "rotated twice"),
    "a norm": ({"v": group(entry("input", "norm"))}, A_INPUT, LINEAR, "has no matrix of floats"),
    "a module of others": ({"v": group(entry("input", "re:layers.*"))}, A_INPUT, LINEAR, "'layers', which has no"),
    "no such module": ({"v": group(entry("input", "layers.7.a"))}, A_INPUT, LINEAR, "the checkpoint lacks"),
    "a tied head": (
        {"v": group(entry("input", "Linear"))}, A_INPUT, {**LINEAR, "ignore": ["head"]}, "'head', which has no matrix",
    ),
    "another class": ({"v": group(entry("input", "Embedding"))}, A_INPUT, LINEAR, "the class 'Embedding'"),
    "a class that is not told": ({"v": group(entry("input", "Linear"))}, A_INPUT, _OTHER, "the class 'Linear'"),
    "an embedding, maybe": ({"v": group(_OUT)}, A_OUTPUT, _OTHER, "does not specify that this module is linear"),
    "an expression": ({"v": group(entry("input", "re:(a|b)+"))}, A_INPUT, LINEAR, "which is not supported"),
    "queries alone": ({"v": group(entry("q_attn", "re:.*attn"))}, {}, LINEAR, "with the location 'k_cache'"),
    "queries otherwise": (
        {"v": group(entry("q_attn", "re:.*"), entry("k_cache", "re:.*", inverse=True))}, {}, LINEAR, "is not undone",
    ),
    "queries at random": (
        {"v": group(entry("q_attn", "re:.*"), entry("k_cache", "re:.*"), kind="random-matrix")}, {}, LINEAR,
        "is not undone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_rotation_that_no_weight_undoes_is_refused_by_name(case: str, tmp_path: Path) -> None:
    groups, stored, words, why = REFUSED[case]
    source = rotating(tmp_path / "in", groups, stored, words)
    with pytest.raises(UnsupportedError) as caught:
        ckptconv.convert(source, tmp_path / "out", dequantize=True, fsync=False)
    assert why in str(caught.value)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_queries_and_keys_that_turn_together_are_left_and_their_matrices_go(tmp_path: Path) -> None:
    pair = entry("q_attn", "re:.*self_attn$"), entry("k_cache", "re:.*self_attn$")
    stored = {f"layers.0.self_attn.R3_{place}.weight": matrix(SIDE, 8) for place in ("q_attn", "k_cache")}
    made = undone(tmp_path, {"R3": group(*pair, head_dim=SIDE)}, stored)
    assert np.array_equal(made[A], product(A))
    assert not [name for name in made if "R3" in name]


@pytest.mark.skipif(not hasattr(ckptconv, "inspect"), reason="nothing counts weights")
def test_inspect_counts_rotated_weights_and_leaves_their_matrices_out(tmp_path: Path) -> None:
    source = rotating(tmp_path / "in", {"v": group(_IN)}, A_INPUT)
    found = ckptconv.inspect(source).quantized
    assert found is not None
    assert {name: one.weights for name, one in found.formats.items()} == {"rotated int8": 1, "int8": 1}
    assert found.parameters == sum(tensor.numel() for name, tensor in TENSORS.items() if not name.endswith("_scale"))
