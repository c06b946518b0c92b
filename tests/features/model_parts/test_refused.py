"""What a user gets wrong of a part is one clear error, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_with_aliases
from effort import every
from features.model_facts import models

import ckptconv
from ckptconv.errors import CkptconvError

LATENT, MIXED, SEEING = models.latent, models.mixed, models.seeing
Made = Callable[[], tuple[models.Shapes, dict[str, Any]]]
DENSE: models.Shapes = {**models.ends(), **models.layer(0), **models.layer(1)}


def made(more: models.Shapes, shapes: models.Shapes | None = None, **config: Any) -> Made:
    """A model with `more` tensors, or others."""
    own, told = MIXED()
    return lambda: ({**(own if shapes is None else shapes), **more}, {**told, **config})


def of_layers(name: str, other: str = "", first: int = 0, last: int = 4) -> models.Shapes:
    """Four layers with one tensor each, of which some have another one too."""
    names = {f"model.layers.{layer}.{name}": (2,) for layer in range(4)}
    return {**names, **{f"model.layers.{layer}.{other}": (2,) for layer in range(first, last) if other}}


@every(
    "model, options, words",
    [
        (LATENT, {"layers": "0-7"}, ["layer 7", "model.layers has layers 0 to 6"]),
        (LATENT, {"layers": "6"}, ["predict further tokens", "0 to 5"]),
        (LATENT, {"layers": "6,0"}, ["after all others"]),
        (LATENT, {"experts": "0-2"}, ["n_group 2", "3 experts"]),
        (LATENT, {"experts": "0-8"}, ["expert 8", "experts 0 to 7"]),
        (LATENT, {"experts": [[0, 1], [2]]}, ["2 lists", "4 modules"]),
        (MIXED, {"experts": [[0, 1], [2], [0, 1], [0, 1]]}, ["1, 2 experts", "one number for all layers"]),
        (made({}, DENSE), {"experts": "0"}, ["has no experts"]),
        (made({}, models.ends()), {"layers": "0"}, ["no numbered layers"]),
        (made({"encoder.layers.0.w": (2,)}), {"layers": "0"}, ["several stacks of layers", "encoder.layers"]),
        (made({"model.layers.5.norm.weight": (8,)}), {"layers": "0"}, ["layer 5 of model.layers, but not 4"]),
        (made({"model.layers.0.mlp.something": (8, 2)}), {"experts": "0,1"}, ["mlp.something", "[8, 2]", "8 experts"]),
        (made({"model.layers.0.mlp.experts.scale": (3, 2)}), {"experts": "0,1"}, ["mlp.experts.scale", "[3, 2]"]),
        # What programs tell by the place of a layer, or cannot be told at all.
        (made(of_layers("mlp.w", "norm.w", first=1), {}), {"layers": "1,2"}, ["layer 0", "has no norm.w", "layer 1"]),
        (made(of_layers("mlp.w", "norm.w", last=1), {}), {"layers": "1,2"}, ["layer 0", "has norm.w", "layer 1"]),
        (made(of_layers("mlp.w", "bias", first=3), {}), {"layers": "0-2"}, ["layer 3", "has bias", "layer 2"]),
        (made(of_layers("mlp.w", "a.lambda_q1"), {}), {"layers": "1,2"}, ["lambda_q1", "number of the layer"]),
        (made(of_layers("self_attn.gate_bias"), {}), {"layers": "1,2"}, ["gate_bias", "number of the layer"]),
        (made(of_layers("m.shared_transf.w"), {}), {"layers": "0-2"}, ["shared_transf of several layers"]),
        (
            made({f"model.queries.{layer}": (2,) for layer in range(4)}),
            {"layers": "0-2"},
            ["4 model.queries.N next to 4 model.layers.N"],
        ),
        (
            made({"model.layers.1.mlp.gate.bias": (9,)}),
            {"experts": "0,1"},
            ["mlp.gate.bias", "[9]"],
        ),
        (made({"model.layers.1.mlp.gate.qweight": (8, 8)}), {"experts": "0,1"}, ["gate.qweight", "8 experts"]),
        (LATENT, {"component": "text"}, ["no text component"]),
        (LATENT, {"component": "vision"}, ["no vision component"]),
        (MIXED, {"component": "mtp"}, ["no layers that predict further tokens"]),
        (made({"vision_tower.w": (2,)}), {"component": "vision"}, ["no configuration of its vision component"]),
        (MIXED, {"config": "no-such.json"}, ["no-such.json", "does not exist"]),
    ],
)
def test_what_a_user_gets_wrong_is_said(model: Made, options: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    shapes, config = model()
    models.save(tmp_path / "m", shapes, config)
    with pytest.raises(CkptconvError) as error:
        ckptconv.convert(tmp_path / "m", tmp_path / "out", **options)
    assert [word for word in words if word not in str(error.value)] == []
    assert "Nothing was written." in str(error.value)
    assert not (tmp_path / "out").exists()


@every("shape", [(8,), (8, 8)])
def test_what_has_the_length_by_chance_is_not_cut(shape: tuple[int, ...], tmp_path: Path) -> None:
    shapes, config = MIXED()
    shapes |= {"model.layers.1.mlp.norm.weight": shape, "model.layers.1.self_attn.sinks": shape}
    models.save(tmp_path / "m", shapes, config)
    ckptconv.convert(tmp_path / "m", tmp_path / "out", experts="0-3", fsync=False)
    made = load_with_aliases(tmp_path / "out")
    for name in ("mlp.norm.weight", "self_attn.sinks", "mlp.shared_experts.up_proj.weight"):
        assert made[f"model.layers.1.{name}"].shape[0] == 8


def test_layers_that_differ_are_kept_at_their_place(tmp_path: Path) -> None:
    models.save(tmp_path / "m", of_layers("mlp.w", "norm.w", first=1), {"num_hidden_layers": 4})
    assert ckptconv.convert(tmp_path / "m", tmp_path / "out", layers="0,2", fsync=False).tensors == 3
    # Two layers without are not told by their place.
    models.save(tmp_path / "two", of_layers("mlp.w", "norm.w", first=2), {"num_hidden_layers": 4})
    assert ckptconv.convert(tmp_path / "two", tmp_path / "out", layers="2,3", overwrite=True, fsync=False).tensors == 4


def test_a_correction_beside_the_module_with_experts_is_cut(tmp_path: Path) -> None:
    shapes, config = MIXED()
    tensors = models.save(tmp_path / "m", {**shapes, "model.layers.1.moe.router.expert_bias": (8,)}, config)
    ckptconv.convert(tmp_path / "m", tmp_path / "out", experts="1,3,5", fsync=False)
    made = load_with_aliases(tmp_path / "out")
    name = "model.layers.1.moe.router.expert_bias"
    assert torch.equal(made[name], tensors[name][[1, 3, 5]])
