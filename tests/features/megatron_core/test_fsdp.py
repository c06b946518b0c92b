"""Checkpoints of Megatron-FSDP: torch saves them here under the keys that Megatron-LM's own converter writes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cells import VERIFY
from checkpoints import assert_same, ckptconv_here, done
from features.megatron_core.fsdp_step import joined, saved
from safetensors.torch import load_file

from ckptconv.errors import CorruptError
from ckptconv.formats.detect import open_source


def test_its_weights_and_states_have_the_names_of_parameters(tmp_path: Path) -> None:
    weights = joined(saved(tmp_path / "run"))
    words = ("--no-fsync", "--optimizer", tmp_path / "states.safetensors", *VERIFY)
    run = done(ckptconv_here("convert", tmp_path / "run", tmp_path / "model.safetensors", *words))
    assert "The gate (_w) and up (_v) parts are joined" in run.out
    assert "Not converted: 'args'" not in run.out
    assert_same(load_file(tmp_path / "model.safetensors"), weights)
    facts = open_source(tmp_path / "run").facts
    assert (facts["iteration"], facts["EP"], facts["learning rate"]) == (7, 2, 0.5)
    states = load_file(tmp_path / "states.safetensors")
    assert_same({name: states[f"{name}.exp_avg"] for name in weights}, {name: w * 2 for name, w in weights.items()})


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_of_several_stages_under_the_same_names_are_refused(layers: int, tmp_path: Path) -> None:
    model = {f"module.decoder.layers.{layer}.mlp.linear_fc2.weight": torch.ones(2, 2) for layer in range(layers)}
    args = Namespace(num_layers=2, pipeline_model_parallel_size=2)
    (tmp_path / "run").mkdir()
    dcp.save({"checkpoint_version": 3.0, "args": args, "model": model}, checkpoint_id=tmp_path / "run", no_dist=True)
    run = ckptconv_here("convert", tmp_path / "run", tmp_path / "out", "--no-fsync")
    assert (run.code, (tmp_path / "out").exists()) == ((5, False) if layers == 1 else (0, True))
    assert ("contains 1 of the 2 layers. Megatron-FSDP stored the layers of 2 pipeline" in run.err) == (layers == 1)


def test_gate_without_up_is_refused(tmp_path: Path) -> None:
    state = {"checkpoint_version": 3.0, "model": {"module.decoder.layers.0.mlp.linear_fc1.weight_w": torch.ones(2, 2)}}
    (tmp_path / "run").mkdir()
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    with pytest.raises(CorruptError, match="needs _w and _v"):
        open_source(tmp_path / "run")


def test_a_wrapped_model_of_another_program_keeps_its_names(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    dcp.save({"model": {"module.a": torch.ones(2)}, "iteration": 3}, checkpoint_id=tmp_path / "run", no_dist=True)
    assert [*open_source(tmp_path / "run").weights] == ["module.a"]
