"""The programs in `examples` that load a step into a model of transformers."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_ecosystem import MODELS


def example(name: str) -> Any:
    """A program of the directory examples, as a module."""
    spec = spec_from_file_location(name, Path(__file__).parents[4] / "examples" / f"{name}.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("way", ["loaded", "dispatched"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_on_the_meta_device_is_loaded_from_distcp_files(kind: str, way: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = MODELS[kind]().eval()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step", no_dist=True)
    program = example("load_transformers")
    other = getattr(program, way)(model.config, str(tmp_path / "step"))
    ids = torch.arange(7).reshape(1, 7)
    assert torch.equal(other(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", MODELS)
def test_accelerate_offloads_what_it_loads_from_distcp_files(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = MODELS[kind]().eval()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step", no_dist=True)
    inner = next(name for name, _ in model.named_children())
    places = {name: "cpu" for name, _ in model.named_children()} | {inner: "disk"}
    other = example("load_transformers").dispatched(
        model.config, str(tmp_path / "step"), device_map=places, offload_folder=tmp_path / "offloaded"
    )
    assert list((tmp_path / "offloaded").glob("*.dat"))
    ids = torch.arange(7).reshape(1, 7)
    assert torch.equal(other(ids).logits, model(ids).logits)
