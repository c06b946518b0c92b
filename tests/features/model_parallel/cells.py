"""What tests of the trunk ask of files of model-parallel ranks too."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from lone_files import STATE, Make, W, making, moved


def of_megatron(*directories: str, **sizes: int) -> Make:
    args = argparse.Namespace(lr=1.0, **{f"{kind}_model_parallel_size": size for kind, size in sizes.items()})
    return making(
        {"args": args, "model": {"w": W}}, *(f"iter_0000005/{each}/model_optim_rng.pt" for each in directories)
    )


def of_meta(*names: str, share: int = 1) -> Make:
    state = {
        "tok_embeddings.weight": torch.zeros(8, 4),
        "layers.0.attention.wo.weight": torch.zeros(4, 4 // share),
        "norm.weight": torch.ones(4),
    }
    return making(state, *names)


# One file of many, and what is to be named in its place.
PARTS: dict[str, tuple[Make, str]] = {
    "Megatron, tensors": (of_megatron("mp_rank_00", "mp_rank_01"), "convert {0.parent.parent} OUTPUT --map"),
    "Megatron, stages": (of_megatron("mp_rank_00_000", "mp_rank_00_001"), "--map"),
    "Megatron, alone": (of_megatron("mp_rank_00", tensor=2), "--map"),
    "Megatron, of another name": (moved(of_megatron("mp_rank_00", pipeline=2)), "--map"),
    "Megatron, another rank": (of_megatron("mp_rank_01"), "--map"),
    "Megatron's optimizer": (making(STATE, "iter_0000005/mp_rank_00/distrib_optim.pt"), "--map"),
    "NeMo": (making(STATE, "tp_rank_01_pp_rank_000/model_weights.ckpt"), "--map"),
    "Meta": (of_meta("consolidated.00.pth", "consolidated.01.pth"), "--map meta-llama3"),
    "Meta, another": (of_meta("consolidated.01.pth"), "--map meta-llama3"),
    "Meta, alone": (of_meta("consolidated.00.pth", share=2), "--map meta-llama3"),
    "Meta, of another name": (of_meta("model.pt", share=2), "--map meta-llama3"),
}
# Those that are taken alone, that are by themselves, and that were moved.
TAKEN_ALONE = ["Megatron, tensors", "Meta"]
LONELY = ["Meta, alone", "Megatron, alone"]
LYING_ELSEWHERE = ["Megatron, alone"]
WHOLE_FILES: dict[str, Make] = {
    "Megatron's only rank": of_megatron("mp_rank_00", tensor=1, pipeline=1),
    "Megatron's only rank, which does not tell": of_megatron("mp_rank_00"),
    "Meta's only file": of_meta("consolidated.00.pth"),
}


def _ranks_of_megatron(step: Path) -> Path:
    from .test_ranks import of_ranks

    return (of_ranks(step.parent / "run", "mp_rank_00", "mp_rank_01") / "iter_0000005").rename(step)


def _ranks_of_meta(step: Path) -> Path:
    step.mkdir()
    for rank in range(2):
        torch.save(
            {"tok_embeddings.weight": W, "layers.0.attention.wq.weight": W}, step / f"consolidated.{rank:02}.pth"
        )
    return step


# A step of a run, by what writes it to a directory.
ONE_STEP: dict[str, Callable[[Path], Path]] = {"Megatron-LM": _ranks_of_megatron, "Meta": _ranks_of_meta}
