"""`convert` to a `.pt` file: it does the same as `safetensors2pt`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cells import VERIFY
from checkpoints import Run, ckptconv_here, done

NESTED = {"s": {"x": torch.arange(6.0), "y": torch.ones(2)}, "epoch": 3}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def succeeding(*words: str) -> Run:
    return done(ckptconv_here(*words))


def test_safetensors_become_a_file_for_torch_if_the_output_is_called_so() -> None:
    torch.save(NESTED, "in.pt")
    succeeding("convert", "in.pt", "in.safetensors")
    succeeding("safetensors2pt", "in.safetensors", "back.pt")
    expected = Path("back.pt").read_bytes()
    succeeding("convert", "in.safetensors", "back.pt")
    assert Path("back.pt").read_bytes() == expected
    for suffix in ("pth", "bin", "ckpt"):
        succeeding("convert", "in.safetensors", f"back.{suffix}")
        assert torch.load(f"back.{suffix}")["epoch"] == 3


def test_a_complex_tensor_is_not_cast_whatever_it_is_called() -> None:
    torch.save({"s": {"z": torch.tensor([1 + 2j]), "w": torch.ones(2)}}, "in.pt")
    succeeding("convert", "in.pt", "renamed.safetensors", "--rename", "^s=net")
    succeeding("convert", "renamed.safetensors", "out.safetensors", "--dtype", "bf16", *VERIFY)
    succeeding("convert", "out.safetensors", "back.pt")
    back = torch.load("back.pt")
    assert torch.equal(back["s"]["z"], torch.tensor([1 + 2j]))
    assert back["s"]["w"].dtype == torch.bfloat16
