"""Lazy tensors of an opened checkpoint in a state that is saved; and a saved state that is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from checkpoints import ZERO

import ckptconv
from ckptconv import UnsupportedError, UsageError


def test_tensors_of_a_checkpoint_are_written_without_being_loaded(tmp_path: Path) -> None:
    with ckptconv.open(ZERO / "z3_fp32_w4" / "checkpoint") as ck:
        chosen = {"mine": ck["l1.weight"], "half": ck["l1.weight"].to("bf16")}
        ckptconv.save_state_dict(chosen, tmp_path / "x.safetensors", fsync=False)
        loaded = ckptconv.load_state_dict(tmp_path / "x.safetensors")
        assert torch.equal(loaded["mine"], ck.get_tensor("l1.weight"))
        assert torch.equal(loaded["half"], ck.get_tensor("l1.weight").bfloat16())


def test_lazy_tensors_are_tensors_wherever_they_stand(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4.0), "b": torch.ones(2)}, tmp_path / "secret-place.pt")
    with ckptconv.open(tmp_path / "secret-place.pt", storage_options={"secret": "s3cr3t"}) as ck:
        state = {"list": [ck["w"], (ck["b"], 1)], "dict": {"w": ck["w"]}, "object": argparse.Namespace(inner=ck["b"])}
        ckptconv.save_state_dict(state, tmp_path / "x.safetensors", fsync=False)
    data = (tmp_path / "x.safetensors").read_bytes()
    assert b"s3cr3t" not in data
    assert b"secret-place" not in data
    loaded = ckptconv.load_state_dict(tmp_path / "x.safetensors")
    assert torch.equal(loaded["list"][0], torch.arange(4.0))
    assert torch.equal(loaded["list"][1][0], torch.ones(2))
    assert loaded["list"][1][1] == 1


def test_a_handle_does_not_go_into_a_file(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4.0)}, tmp_path / "x.pt")
    with ckptconv.open(tmp_path / "x.pt", storage_options={"secret": "s3cr3t"}) as ck:
        for state in ({"ck": ck}, [ck], {"f": ck.optimizer}, [{"memory": ck._memory}]):
            with pytest.raises(UsageError, match="a handle with paths and store settings,"):
                ckptconv.save_state_dict(state, tmp_path / "x.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


@pytest.mark.filterwarnings("error")
def test_a_named_shard_has_whole_tensors(tmp_path: Path) -> None:
    state = {"a": torch.arange(4), "b": torch.ones(3)}
    ckptconv.save_state_dict(state, tmp_path / "m", max_shard_size="40B", fsync=False)
    shards = sorted((tmp_path / "m").glob("model-*-of-*.safetensors"))
    assert len(shards) == 2
    for shard in shards:
        with ckptconv.open(shard) as opened:
            for name in opened:
                assert torch.equal(opened.get_tensor(name), state[name])
            with pytest.raises(UnsupportedError, match="sharded set"):
                ckptconv.convert(opened, tmp_path / "x.safetensors")


def test_tied_weights_are_one_tensor_when_they_are_loaded(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(500, 8), torch.nn.Linear(8, 500, bias=False))
    model[1].weight = model[0].weight  # type: ignore[union-attr,assignment]
    ckptconv.save_state_dict(model.state_dict(), tmp_path / "x.safetensors")
    loaded = ckptconv.load_state_dict(tmp_path / "x.safetensors")
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()
