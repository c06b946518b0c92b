"""Tensors of subclasses, as torchao and bitsandbytes save them: their parts come out as they are, never cast."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ckptconv_here
from safetensors.torch import load_file
from torch.utils._python_dispatch import return_and_correct_aliasing


def _wrapper(name: str) -> type[torch.Tensor]:
    """A class like those of torchao: a wrapper of the tensors `qdata` and `scale`."""

    class Wrapper(torch.Tensor):
        qdata: torch.Tensor
        scale: torch.Tensor
        block_size: list[int]

        @staticmethod
        def __new__(cls: Any, qdata: torch.Tensor, scale: torch.Tensor) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=torch.bfloat16)
            made.qdata, made.scale, made.block_size = qdata, scale, [1, qdata.shape[-1]]
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default:
                return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].qdata, args[0].scale))
            raise NotImplementedError(func)

    Wrapper.__name__ = Wrapper.__qualname__ = name
    Wrapper.__module__ = "torchao.quantization"
    return Wrapper


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of torchao's name with classes of its names."""
    module = types.ModuleType("torchao.quantization")
    for name in ("Float8Tensor", "Another"):
        setattr(module, name, _wrapper(name))
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", module)
    return module


def quantized(cls: Any) -> dict[str, Any]:
    data = torch.arange(12.0).reshape(3, 4).to(torch.float8_e4m3fn)
    return {"layers.0.weight": cls(data, torch.rand(3, 1)), "layers.0.bias": torch.ones(3)}


def test_torchao_s_names_of_the_parts(torchao: Any, tmp_path: Path) -> None:
    """Those of torchao.prototype.safetensors."""
    state = quantized(torchao.Float8Tensor)
    torch.save(state, tmp_path / "m.pt")
    run = ckptconv_here("pt2safetensors", tmp_path / "m.pt", "--verify", "--json")
    assert run.code == 0, run.err
    found, weight = load_file(tmp_path / "m.safetensors"), state["layers.0.weight"]
    assert found.keys() == {"layers.0._weight_qdata", "layers.0._weight_scale", "layers.0.bias"}
    assert torch.equal(found["layers.0._weight_qdata"].view(torch.uint8), weight.qdata.view(torch.uint8))
    assert torch.equal(found["layers.0._weight_scale"], weight.scale)


def test_the_way_back_gives_the_tensors_of_the_class(torchao: Any, tmp_path: Path) -> None:
    state = quantized(torchao.Float8Tensor)
    torch.save(state, tmp_path / "m.pt")
    assert ckptconv_here("pt2safetensors", tmp_path / "m.pt").code == 0
    back = ckptconv_here("safetensors2pt", tmp_path / "m.safetensors", tmp_path / "back.pt", "--opaque", "keep")
    assert back.code == 0, back.err
    weight, theirs = torch.load(tmp_path / "back.pt", weights_only=False)["layers.0.weight"], state["layers.0.weight"]
    assert type(weight) is torchao.Float8Tensor
    assert (weight.dtype, weight.shape, weight.block_size) == (theirs.dtype, theirs.shape, theirs.block_size)
    assert torch.equal(weight.qdata.view(torch.uint8), theirs.qdata.view(torch.uint8))
    assert torch.equal(weight.scale, theirs.scale)


@pytest.mark.parametrize("kind", ["Float8Tensor", "Another"])
def test_a_cast_leaves_the_parts_as_they_are(kind: str, torchao: Any, tmp_path: Path) -> None:
    state = quantized(getattr(torchao, kind))
    torch.save(state, tmp_path / "m.pt")
    run = ckptconv_here("pt2safetensors", tmp_path / "m.pt", "--dtype", "bf16", "--verify", "--json")
    assert run.code == 0, run.err
    assert "2 tensors are parts of quantized ones, and were not cast to bfloat16" in run.json["warnings"][0]
    dtypes = {
        name.rpartition(".")[2][-5:]: tensor.dtype for name, tensor in load_file(tmp_path / "m.safetensors").items()
    }
    assert dtypes == {"qdata": torch.float8_e4m3fn, "scale": torch.float32, "bias": torch.bfloat16}
    assert ckptconv_here("verify", tmp_path / "m.pt", tmp_path / "m.safetensors", "--dtype", "bf16").code == 0
    back = ckptconv_here(
        "safetensors2pt", tmp_path / "m.safetensors", tmp_path / "b.pt", "--opaque", "keep", "--dtype", "fp16", "--json"
    )
    assert back.code == 0, back.err
    assert "not cast to float16" in " ".join(back.json["warnings"])


def test_a_cast_leaves_what_bitsandbytes_scales_with_as_it_is(tmp_path: Path) -> None:
    alone = {
        "a.weight.absmax": torch.rand(4),
        "a.weight.quant_map": torch.rand(16),
        "b.SCB": torch.rand(3),
        "s.__bnb_optimizer_quant_state__.absmax1": torch.rand(2),
    }
    state = {
        **alone,
        "a.weight": torch.zeros(8, 1, dtype=torch.uint8),
        "a.weight.quant_state.bitsandbytes__nf4": torch.zeros(5, dtype=torch.uint8),
        "b.weight": torch.zeros(3, 3, dtype=torch.int8),
        "c.weight": torch.ones(2),
        "c.absmax": torch.ones(2),
    }
    torch.save(state, tmp_path / "m.pt")
    run = ckptconv_here("pt2safetensors", tmp_path / "m.pt", "--dtype", "bf16", "--verify", "--json")
    assert run.code == 0, run.err
    assert "4 tensors" in run.json["warnings"][0]
    found = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in alone.items())
    assert {found[name].dtype for name in ("c.weight", "c.absmax")} == {torch.bfloat16}
