"""Files of model-parallel ranks, by themselves and together."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_here
from effort import every
from features.model_parallel.cells import PARTS, of_megatron
from lone_files import moved
from safetensors.torch import load_file

from ckptconv.options.table import OPTIONS

QUIETLY = ("--no-fsync", "--quiet")


def of_ranks(run: Path, *ranks: str) -> Path:
    for rank in ranks:
        place = run / "iter_0000005" / rank
        place.mkdir(parents=True)
        state = {"args": argparse.Namespace(lr=1.0), "iteration": 5, "model": {"language_model": {"w": torch.ones(3)}}}
        torch.save(state, place / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("5")
    return run


@every("below", ["", "iter_0000005"])
def test_the_file_of_a_single_rank_is_converted(below: str, tmp_path: Path) -> None:
    run = of_ranks(tmp_path / "run", "mp_rank_00")
    done = ckptconv_here("pt2safetensors", run / below, tmp_path / "o.safetensors", "--key", "model", "--no-fsync")
    assert done.code == 0, done.err
    assert set(load_file(tmp_path / "o.safetensors")) == {"language_model.w"}
    shutil.rmtree(run)


@every("ranks", [("mp_rank_00", "mp_rank_01"), ("mp_rank_00_000", "mp_rank_00_001")])
def test_files_of_several_ranks_are_refused(ranks: tuple[str, ...], tmp_path: Path) -> None:
    run = ckptconv_here("convert", of_ranks(tmp_path / "run", *ranks), tmp_path / "o.safetensors")
    assert run.code == 5
    assert ranks[1] in run.err
    assert "torch_dist" in run.err
    assert not (tmp_path / "o.safetensors").exists()


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
def test_a_map_does_not_make_a_model_of_one_rank(tmp_path: Path) -> None:
    for family, name in (("Meta, alone", "meta-llama3"), ("Megatron, alone", "megatron-llama")):
        path = PARTS[family][0](tmp_path)
        run = ckptconv_here("convert", path, tmp_path / "o.safetensors", "--map", name, *QUIETLY)
        run.refused(5, path, "--alone")
    run = ckptconv_here("convert", path.parent.parent, tmp_path / "o.safetensors", "--map", "megatron-llama", *QUIETLY)
    run.refused(4, "lacks the file of rank (1, 0, 0)")


def test_what_was_moved_names_no_directory(tmp_path: Path) -> None:
    moved(of_megatron("mp_rank_00", tensor=2))(tmp_path)
    assert "convert DIRECTORY OUTPUT" in ckptconv_here("convert", tmp_path / "model.pt").err
