"""A step with the model that transformers' Trainer writes next to DeepSpeed's ranks is reduced."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import ZERO, ckptconv_here, done
from safetensors.torch import load_file, save_file

STEPS = tuple(f"checkpoint-{number}" for number in (1, 2))


def run_of_trainer(place: Path, dtype: torch.dtype) -> Path:
    """Two steps, each with its weights in a file too; a name that is tied to another one is not in that."""
    for name in STEPS:
        step = shutil.copytree(ZERO / "z2_bf16_w2" / "checkpoint", place / name)
        done(ckptconv_here("zero-to-fp32", step, place.parent / f"{name}.safetensors"))
        weights = load_file(place.parent / f"{name}.safetensors")
        rounded = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in weights.items()}
        save_file(rounded, step / "model.safetensors", {"format": "pt"})
    return place


@pytest.mark.parametrize(
    ("options", "is_reduced"),
    [
        (("--drop", "optimizer"), True),
        (("--as", "bf16"), True),
        (("--as", "fp32"), False),  # it has a tensor of float64, which would be rounded twice
        (("--as", "fp16"), False),
    ],
)
def test_the_same_weights_next_to_ranks_are_no_further_ones(
    options: tuple[str, ...], is_reduced: bool, tmp_path: Path
) -> None:
    run = run_of_trainer(tmp_path / "run", torch.bfloat16)
    before = load_file(run / STEPS[0] / "model.safetensors")
    found = done(ckptconv_here("thin", run, "--age", "0", "--keep-last", 1, *options, "--yes", "--json")).json
    assert [step["done"] for step in found["steps"]] == [is_reduced, False]
    assert (run / STEPS[0] / "global_step3").exists() is not is_reduced
    after = load_file(run / STEPS[0] / "model.safetensors")
    assert all(torch.equal(after[name].to(tensor.dtype), tensor) for name, tensor in before.items())


def test_other_weights_next_to_ranks_keep_the_step(tmp_path: Path) -> None:
    run = run_of_trainer(tmp_path / "run", torch.bfloat16)
    file = run / STEPS[0] / "model.safetensors"
    weights = load_file(file)
    changed = next(iter(weights))
    save_file({**weights, changed: weights[changed] + 1}, file, {"format": "pt"})
    before = file.read_bytes()
    found = done(ckptconv_here("thin", run, "--age", "0", "--keep-last", 1, "--drop", "optimizer", "--yes", "--json"))
    assert found.json["steps"][0]["why"] == [f"reduced, it would lack {STEPS[0]}/model.safetensors"]
    assert file.read_bytes() == before
    plan = done(ckptconv_here("thin", run, "--age", "0", "--keep-last", 1, "--drop", "optimizer")).out.splitlines()
    assert plan[-1] == "nothing was changed: no step would be reduced"
