"""Every format of the trunk keeps what all promise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from checkpoints import (
    ZERO,
    ckptconv_here,
    seven_shards,
    tag_of,
    widened,
)
from dcp_checkpoints import checkpoint_of
from format_suite import FormatSuite
from rank_files import placed
from rank_files import write as write_ranks
from safetensors.torch import load_file, save_file
from step_files import write_step
from tar_writer import Writer, pack
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

# ------------------------------------------------------------------------------------------------------ files of torch


class TestZip(FormatSuite):
    command, family = "pt2safetensors", "torch"

    def write(self, place: Path) -> Path:
        return seven_shards(place / "model.pt")

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return torch.load(checkpoint, weights_only=True)  # type: ignore[no-any-return]


class TestStream(TestZip):
    def write(self, place: Path) -> Path:
        state = torch.load(seven_shards(place / "model.pt"), weights_only=True)
        torch.save(state, place / "model.pt", _use_new_zipfile_serialization=False)
        return place / "model.pt"


class TestTar(TestZip):
    def write(self, place: Path) -> Path:
        state = torch.load(seven_shards(place / "model.pt"), weights_only=True)
        return pack(Writer(state).members(), place / "model.pt")

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return torch.load(checkpoint, weights_only=False)  # type: ignore[no-any-return]


class TestTorchScript(FormatSuite):
    command, family = "pt2safetensors", "torch"

    def write(self, place: Path) -> Path:
        torch.manual_seed(0)
        torch.jit.save(torch.jit.script(nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))), place / "model.pt")  # type: ignore[no-untyped-call]
        return place / "model.pt"

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return torch.jit.load(checkpoint).state_dict()  # type: ignore[no-untyped-call,no-any-return]


class TestShardedSet(FormatSuite):
    command, family = "pt2safetensors", "torch"

    def write(self, place: Path) -> Path:
        names = {}
        for number in (1, 2):
            name = f"pytorch_model-0000{number}-of-00002.bin"
            torch.save({f"layer{number}": torch.full((250, 300), float(number))}, place / name)
            names[f"layer{number}"] = name
        index = {"metadata": {"total_size": 600_000}, "weight_map": names}
        (place / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        return place

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return {f"layer{number}": torch.full((250, 300), float(number)) for number in (1, 2)}


class TestRanks(FormatSuite):
    command, family = "pt2safetensors", "torch"
    weights = "model_rank*"
    state: ClassVar[dict[str, torch.Tensor]] = {
        **{f"layer{number}": torch.full((250, 300), float(number)) for number in (1, 2)},
        "scale": torch.tensor(2.0),
    }

    def write(self, place: Path) -> Path:
        def of_rank(mesh: DeviceMesh, rank: int) -> dict[str, torch.Tensor]:
            layers = {name: placed(each, mesh, Shard(0)) for name, each in self.state.items() if each.dim()}
            return {**layers, "scale": self.state["scale"]}

        return write_ranks(place, (3,), of_rank)

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return self.state


class TestStep(TestRanks):
    weights = "model_*"

    def write(self, place: Path) -> Path:
        return write_step(place / "step-1", self.state, 3)


# --------------------------------------------------------------------------------------------------------- directories


class Zero(FormatSuite):
    command, family = "zero-to-fp32", "deepspeed"
    case: str

    def write(self, place: Path) -> Path:
        return Path(shutil.copytree(ZERO / self.case / "checkpoint", place / "checkpoint"))

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        expected = load_file(ZERO / self.case / "expected.safetensors")
        return {name: widened(tensor) for name, tensor in expected.items()}


class TestZero1(Zero):
    case = "z1_bf16_w2"


class TestZero2(Zero):
    case = "z2_fp32_w3"


class TestZero3(Zero):
    case = "z3_fp32_w4"


class TestUniversal(TestZero3):
    weights = "fp32.pt"

    def write(self, place: Path) -> Path:
        checkpoint = super().write(place)
        universal = place / "global_step_universal"
        assert ckptconv_here("zero-to-fp32", tag_of(checkpoint), "--universal", universal).code == 0
        shutil.rmtree(checkpoint)
        return universal


class TestDcp(FormatSuite):
    command, family = "dcp2safetensors", "dcp"
    case = "hsdp_2x2"

    def write(self, place: Path) -> Path:
        return Path(shutil.copytree(checkpoint_of(self.case), place / "step"))

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        made = checkpoint.parent.parent / "expected.pt"
        dcp_to_torch_save(checkpoint, made)
        return torch.load(made, weights_only=False)["model"]  # type: ignore[no-any-return]


class TestSafetensors(FormatSuite):
    command, family, shards = "safetensors2pt", "safetensors", ()

    def write(self, place: Path) -> Path:
        save_file({f"layer{n}": torch.full((250, 300), float(n)) for n in range(3)}, place / "model.safetensors")
        return place / "model.safetensors"

    def expected(self, checkpoint: Path) -> Mapping[str, torch.Tensor]:
        return load_file(checkpoint)
