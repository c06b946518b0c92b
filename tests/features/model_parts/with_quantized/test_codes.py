"""A part of quantized weights stands for the part of the weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED
from effort import every
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.errors import CkptconvError

DATA = Path(__file__).parents[2] / "quantized" / "data"


def _twice(value: Any) -> Any:
    """What a configuration says of the first layer, of the second too."""
    if isinstance(value, dict):
        more = {key.replace("layers.0.", "layers.1."): _twice(each) for key, each in value.items()}
        return {**{key: _twice(each) for key, each in value.items()}, **more}
    if isinstance(value, list):
        others = [each.replace("layers.0.", "layers.1.") if isinstance(each, str) else each for each in value]
        return [*map(_twice, value), *(each for each in others if each not in value)]
    return value


def _dialects() -> Iterator[str]:
    """The checkpoints of the tests that have a layer."""
    for place in sorted(DATA.iterdir()):
        if (place / "config.json").exists():
            with safe_open(place / "model.safetensors", "pt") as opened:
                if any(name.startswith("model.layers.0.") for name in opened.keys()):  # noqa: SIM118
                    yield place.name


def _same(one: Path, other: Path) -> bool:
    tensors = [load_file(place / "model.safetensors") for place in (one, other)]
    return tensors[0].keys() == tensors[1].keys() and all(
        torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0]
    )


DIALECTS = [*_dialects()]


@every("dialect", DIALECTS, DIALECTS)
def test_a_part_of_codes_gives_the_part_of_the_weights(dialect: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with safe_open(DATA / dialect / "model.safetensors", "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(DATA / dialect / "model.safetensors")
    tensors |= {name.replace("layers.0.", "layers.1."): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, source / "model.safetensors", metadata)
    told = _twice(json.loads((DATA / dialect / "config.json").read_text()))
    (source / "config.json").write_text(json.dumps({**told, "num_hidden_layers": 2}))
    try:
        ckptconv.convert(source, tmp_path / "weights", dequantize=True, copy_config=True, fsync=False)
    except CkptconvError:
        pytest.skip(f"{dialect} is not read")
    options: dict[str, Any] = {"layers": [1], "fsync": False, **VERIFIED}
    ckptconv.convert(source, tmp_path / "codes", **options)
    ckptconv.convert(tmp_path / "codes", tmp_path / "after", dequantize=True, fsync=False)
    ckptconv.convert(tmp_path / "weights", tmp_path / "before", **options)
    ckptconv.convert(source, tmp_path / "at-once", dequantize=True, **options)
    assert _same(tmp_path / "after", tmp_path / "before")
    assert _same(tmp_path / "at-once", tmp_path / "before")


def test_there_are_dialects_with_layers() -> None:
    assert len(DIALECTS) > 5


@every("way", ["fp8-block", "mxfp8", "int4-g32"])
def test_a_part_is_quantized_as_the_whole_is(way: str, tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(3)
    shapes = {f"model.layers.{layer}.mlp.up_proj.weight": (96, 64) for layer in range(3)}
    shapes |= {f"model.layers.{layer}.mlp.experts.gate_up_proj.weight": (4, 32, 64) for layer in range(3)}
    (tmp_path / "m").mkdir()
    save_file(
        {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()},
        tmp_path / "m" / "model.safetensors",
    )
    (tmp_path / "m" / "config.json").write_text(json.dumps({"num_hidden_layers": 3, "num_experts": 4}))
    part: dict[str, Any] = {"layers": "2,0", "experts": "1,3", "fsync": False}
    ckptconv.convert(tmp_path / "m", tmp_path / "at-once", quantize=way, **part)
    ckptconv.convert(tmp_path / "m", tmp_path / "whole", quantize=way, fsync=False)
    ckptconv.convert(tmp_path / "whole", tmp_path / "part", **VERIFIED, **part)
    assert _same(tmp_path / "at-once", tmp_path / "part")
    told = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("at-once", "part")]
    assert told[0]["quantization_config"] == told[1]["quantization_config"]
    assert told[1]["num_hidden_layers"] == told[1]["num_experts"] == 2


def test_layers_of_which_some_are_quantized_may_be_first(tmp_path: Path) -> None:
    scales = {f"model.layers.{layer}.up.weight_scale_inv": torch.ones(1, 1) for layer in range(1, 4)}
    codes = {f"model.layers.{layer}.up.weight": torch.ones(4, 4).to(torch.float8_e4m3fn) for layer in range(1, 4)}
    (tmp_path / "m").mkdir()
    save_file({"model.layers.0.up.weight": torch.ones(4, 4), **codes, **scales}, tmp_path / "m" / "model.safetensors")
    assert ckptconv.convert(tmp_path / "m", tmp_path / "out", layers="1-3", fsync=False).tensors == 6
