"""A model file with ZeRO-3's placeholders of weights is not taken for a model."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from cells import looking, of_features
from checkpoints import ZERO, ckptconv_here, contents, done
from effort import every
from lone_files import STATE, W, making
from safetensors.torch import load_file, save_file

LAYERS = [f"layers.{layer}.{name}.weight" for layer in range(2) for name in ("q", "k", "up", "down")]
HOLLOW = {name: torch.empty(0) for name in LAYERS}
NORMS = {f"layers.{layer}.norm.weight": torch.ones(4) for layer in range(2)}
FACTORS = {name.replace("weight", f"lora_{side}.default.weight"): W.clone() for name in LAYERS for side in "AB"}
PLACEHOLDERS = {
    "all weights": HOLLOW,
    "norms are whole": {**HOLLOW, **NORMS},
    "factors are whole": {**HOLLOW, **NORMS, **FACTORS},
    "factors alone": {name: torch.empty(0) for name in FACTORS},
    "buffers are whole": {**HOLLOW, "rotary.inv_freq": torch.ones(4), "position_ids": torch.arange(8)},
}
WHY = "at least half of its tensors have the shape [0]"


@every("case", PLACEHOLDERS)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "step.ckpt"])
def test_placeholders_are_no_model(case: str, name: str, tmp_path: Path) -> None:
    path, tensors = tmp_path / "in" / name, PLACEHOLDERS[case]
    path.parent.mkdir()
    making(STATE, "other/model.safetensors")(tmp_path)
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save({"state_dict": tensors, "epoch": 3} if path.suffix == ".ckpt" else tensors, path)
    before = contents(tmp_path)
    for command in (
        ("convert", path, tmp_path / "o"),
        ("convert", path, tmp_path / "o.pt" if path.suffix == ".safetensors" else tmp_path / "o.safetensors"),
        *([("convert", path.parent, tmp_path / "o")] if path.suffix != ".ckpt" else []),
        *itertools.chain(*(words(path, tmp_path) for words in of_features("refused_alone"))),
    ):
        ckptconv_here(*command).refused(4, path, WHY, "zero-to-fp32 DIRECTORY OUTPUT")
    assert contents(tmp_path) == before
    for command_name in looking():
        shown = done(ckptconv_here(command_name, path, "--json"))
        assert any(WHY in warning for warning in shown.json["warnings"]), command_name


def test_the_directory_with_the_weights_is_named(tmp_path: Path) -> None:
    step = tmp_path / "a step"
    for path in (ZERO / "z3_bf16_w2/checkpoint").rglob("*"):
        if path.is_file():
            copy = step / path.relative_to(ZERO / "z3_bf16_w2/checkpoint")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    save_file(HOLLOW, step / "model.safetensors")
    refused = ckptconv_here("convert", step / "model.safetensors", tmp_path / "o")
    refused.refused(4, f"ckptconv zero-to-fp32 '{step}' OUTPUT")
    done(ckptconv_here("zero-to-fp32", step, tmp_path / "o.safetensors"))
    assert all(tensor.numel() for tensor in load_file(tmp_path / "o.safetensors").values())


def test_a_few_empty_weights_are_converted(tmp_path: Path) -> None:
    tensors = {**{name: W.clone() for name in LAYERS[1:]}, LAYERS[0]: torch.empty(0), "empty.weight": torch.empty(0, 4)}
    torch.save(tensors, tmp_path / "model.pt")
    run = done(ckptconv_here("convert", tmp_path / "model.pt", tmp_path / "o.safetensors", "--json"))
    assert run.json["warnings"] == []
    assert load_file(tmp_path / "o.safetensors").keys() == tensors.keys()


def test_matrices_without_rows_are_converted(tmp_path: Path) -> None:
    save_file({name: torch.empty(0, 4) for name in LAYERS}, tmp_path / "model.safetensors")
    run = done(ckptconv_here("convert", tmp_path / "model.safetensors", tmp_path / "o.safetensors", "--json"))
    assert run.json["warnings"] == []
