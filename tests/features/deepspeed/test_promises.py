"""Checkpoints of DeepSpeed keep what every format promises."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from checkpoints import ZERO, widened
from format_suite import FormatSuite
from safetensors.torch import load_file


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
