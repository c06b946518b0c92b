"""The manifest of an output in a format of torch.distributed.checkpoint records its map, so `verify` needs none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cells import VERIFIED, verifying
from checkpoints import ckptconv_here, done
from safetensors.torch import save_file

from ckptconv.outputs.kinds import KINDS

MAP = 'about = "x"\nsource = "x"\n[[rule]]\na = "w.{l} : m n"\nb = "v.{l} : n m"\n'


@pytest.mark.parametrize(
    "to", [to for to in ("dcp", "dcp-hf", "torch-checkpointing") if to in {*KINDS, "dcp", "dcp-hf"}]
)
def test_the_output_of_a_map_is_verified_without_it(to: str, tmp_path: Path) -> None:
    save_file({"w.0": torch.arange(6.0).view(2, 3)}, tmp_path / "a.safetensors")
    (tmp_path / "map.toml").write_text(MAP)
    words = "convert", tmp_path / "a.safetensors", tmp_path / "out", "--to", to, "--map", tmp_path / "map.toml"
    done(ckptconv_here(*words))
    assert json.loads((tmp_path / "out" / ".ckptconv-manifest.json").read_text())["map"]["text"] == MAP
    (tmp_path / "map.toml").unlink()
    if VERIFIED:
        done(ckptconv_here("verify", tmp_path / "a.safetensors", tmp_path / "out"))


@verifying
def test_states_that_are_not_repeated_are_named(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.save({"model": {"w": weight.detach()}, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    done(ckptconv_here("convert", tmp_path / "a.pt", tmp_path / "out", "--to", "dcp", "--states", tmp_path / "a.pt"))
    run = ckptconv_here("verify", tmp_path / "a.pt", tmp_path / "out")
    assert (run.code, "--states" in run.err) == (1, True)
    done(ckptconv_here("verify", tmp_path / "a.pt", tmp_path / "out", "--states", tmp_path / "a.pt"))
