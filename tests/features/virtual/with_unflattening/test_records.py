"""Descriptions with a structure record are read back as files with one are."""

from __future__ import annotations

from pathlib import Path

import torch
from cells import VERIFIED
from effort import every
from features.virtual.test_virtual import described
from reading import state_of
from safetensors.torch import load_file

import ckptconv


def test_nested_state_comes_back_whole(tmp_path: Path) -> None:
    state = {"model": {"a": torch.arange(9.0)}, "step": 7, "names": ["x", ("y",)], "tied": [torch.ones(2)] * 2}
    torch.save(state, tmp_path / "x.pt")
    for options in ((), ("--max-shard-size", "10B")):
        made = described(tmp_path / "x.pt", tmp_path / "x.virtual.json", *options)
        back = state_of(made)
        assert torch.equal(back["model"]["a"], state["model"]["a"])
        assert (back["step"], back["names"]) == (7, ["x", ("y",)])
        assert back["tied"][0].data_ptr() == back["tied"][1].data_ptr()


def test_a_description_of_shards_becomes_the_shards_that_its_files_become(tmp_path: Path) -> None:
    # The structure record has the names in another order than the files do.
    torch.save({"b": torch.ones(3), "a": torch.zeros(3000)}, tmp_path / "x.pt")
    for output in ("x.virtual.json", "plain"):
        ckptconv.convert(tmp_path / "x.pt", tmp_path / output, max_shard_size=500, fsync=False)
    for source, output in (("x.virtual.json", "one"), ("plain", "other")):
        ckptconv.convert(tmp_path / source, tmp_path / output, fsync=False)
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / output).iterdir() if "manifest" not in path.name}
        for output in ("one", "other")
    )
    assert one == other


@every("structure", [True, False])
def test_tensors_that_are_stored_twice_stay_so(structure: bool, tmp_path: Path) -> None:
    weight, number = torch.arange(6.0).reshape(2, 3), torch.tensor(7)
    state = {"a": weight, "b": weight.view(2, 3), "c": weight, "n": number, "m": number[...]}
    torch.save(state, tmp_path / "x.pt")
    made = {}
    for output in ("x.virtual.json", "x.safetensors"):
        ckptconv.convert(tmp_path / "x.pt", tmp_path / output, tied="duplicate", structure=structure, fsync=False)
        ckptconv.convert(tmp_path / output, tmp_path / "out.safetensors", **VERIFIED, fsync=False)
        made[output] = (tmp_path / "out.safetensors").read_bytes()
    assert made["x.virtual.json"] == made["x.safetensors"]
    names = ["a", "b", "m", "n"] if structure else ["a", "b", "c", "m", "n"]
    assert sorted(load_file(tmp_path / "out.safetensors")) == names
