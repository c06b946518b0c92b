"""What a conversion says of objects that are not written back, and the way back refuses."""

from __future__ import annotations

from pathlib import Path

import torch
from attacks.assemble import archive
from checkpoints import ckptconv_here
from features.scan.unknown import evaluated
from torch.distributed.checkpoint import SavePlan

import ckptconv


def test_a_conversion_says_what_the_way_back_does_not_write(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(archive(evaluated(str(tmp_path / "canary"))))
    run = ckptconv_here("convert", tmp_path / "x.pt", tmp_path / "x.safetensors")
    assert run.code == 0
    assert "not written back by safetensors2pt: typing.ForwardRef, typing._eval_type" in run.out
    for options in ([], ["--opaque", "keep"]):
        refused = ckptconv_here("safetensors2pt", *options, tmp_path / "x.safetensors", tmp_path / "y.pt")
        assert refused.code == 3
        assert "--opaque keep" not in refused.err
    assert ckptconv.scan(tmp_path / "x.pt").verdict == "unknown"
    assert not (tmp_path / "canary").exists()


def test_what_the_way_back_writes_with_an_option_is_said_to_those_who_ask_for_all(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "plan": SavePlan([])}, tmp_path / "x.pt")
    words = ("convert", tmp_path / "x.pt", tmp_path / "x.safetensors", "--dry-run")
    said = "written back by safetensors2pt only with --opaque keep: torch.distributed.checkpoint.planner.SavePlan"
    assert said not in ckptconv_here(*words).out
    assert said in ckptconv_here(*words, "-v").out
