"""The loader of vLLM, in vLLM itself where it is installed, and in a stand-in that asks the same of a loader."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import ZERO, assert_same
from safetensors.torch import load_file

from ckptconv import UsageError
from ckptconv.features.vllm import loader as vllm

CASE = "z3_bf16_untied_w2"


@pytest.fixture
def loaders() -> Iterator[dict[str, type]]:
    """The loaders that are registered with a stand-in for vLLM, which asks the same of them."""
    found: dict[str, type] = {}

    class BaseModelLoader(ABC):
        def __init__(self, load_config: Any) -> None:
            self.load_config = load_config

        @abstractmethod
        def download_model(self, model_config: Any) -> None: ...

        @abstractmethod
        def load_weights(self, model: Any, model_config: Any) -> None: ...

    def register_model_loader(load_format: str) -> Callable[[type], type]:
        def register(cls: type) -> type:
            assert issubclass(cls, BaseModelLoader)
            found[load_format] = cls
            return cls

        return register

    package, base = ModuleType("vllm.model_executor.model_loader"), ModuleType("base_loader")
    package.register_model_loader = register_model_loader  # type: ignore[attr-defined]
    base.BaseModelLoader = BaseModelLoader  # type: ignore[attr-defined]
    modules = {
        "vllm": ModuleType("vllm"),
        "vllm.model_executor": ModuleType("vllm.model_executor"),
        package.__name__: package,
        f"{package.__name__}.base_loader": base,
    }
    with mock.patch.dict(sys.modules, modules):
        vllm.register()
        yield found


class Model:
    """A model of vLLM, which is given its weights one by one."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights.update((name, tensor.clone()) for name, tensor in weights)


def test_weights_are_loaded_from_a_zero_checkpoint(loaders: dict[str, type], tmp_path: Path) -> None:
    extra = {"checkpoint": str(ZERO / CASE / "checkpoint")}
    loader = loaders["ckptconv"](SimpleNamespace(model_loader_extra_config=extra))
    model, config = Model(), SimpleNamespace(model=str(tmp_path))
    loader.download_model(config)
    loader.load_weights(model, config)
    assert_same(model.weights, load_file(ZERO / CASE / "expected.safetensors"))


def test_the_model_itself_may_be_the_checkpoint_and_is_cast() -> None:
    got = dict(vllm.weights(str(ZERO / CASE / "checkpoint")))
    assert {tensor.dtype for tensor in got.values()} == {
        tensor.dtype for tensor in load_file(ZERO / CASE / "expected.safetensors").values()
    }


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_itself_loads_a_model(tmp_path: Path) -> None:
    program = Path(__file__).with_name("vllm_model.py")
    done = subprocess.run([sys.executable, program, tmp_path], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "loaded 21 tensors" in done.stdout


@pytest.mark.parametrize("extra", ["[1]", "{", 7, "[" * 100_000, '{"a": ' * 5000 + "1" + "}" * 5000])
def test_options_that_are_none_are_refused(extra: Any) -> None:
    with pytest.raises(UsageError, match="model_loader_extra_config"):
        next(vllm.weights(str(ZERO / CASE / "checkpoint"), extra))
