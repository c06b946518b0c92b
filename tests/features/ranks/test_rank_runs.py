"""Files of ranks below the directory of a step or of a run, as trainers lay them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import assert_same, ckptconv_here, done, load_with_aliases
from dtensors import placed
from effort import every
from features.ranks.rank_files import converted, refused, write
from torch.distributed.tensor import Shard

from ckptconv.formats.detect import open_source

VERL = "model_world_size_2_rank_{}.pt"
WEIGHT = torch.arange(12.0).reshape(6, 2)


def save(place: Path, value: float = 1.0, name: str = VERL) -> None:
    """Write a model whose weight is a multiple of WEIGHT, on two ranks."""
    write(place, (2,), lambda mesh, rank: {"weight": placed(WEIGHT * value, mesh, Shard(0))}, name)


def states(mesh: Any, rank: int) -> Any:
    moments = {"exp_avg": placed(-WEIGHT, mesh, Shard(0))}
    return {"state": {"weight": moments}, "param_groups": [{"lr": 0.5, "params": ["weight"]}]}


def value_of(output: Path) -> float:
    held = load_with_aliases(output)
    value = float(held["weight"][0, 1])
    assert_same(held, {"weight": WEIGHT * value})
    return value


def test_a_step_s_directory_stands_for_the_actor_and_names_the_critic(tmp_path: Path) -> None:
    step = tmp_path / "global_step_100"
    save(step / "actor")
    save(step / "critic", 2)
    torch.save({"position": 3}, step / "data.pt")
    run = done(ckptconv_here("convert", step, tmp_path / "out", "--no-fsync"))
    assert "Took actor." in run.out + run.err
    assert f"{step / 'critic'} is another model" in run.out + run.err
    assert value_of(tmp_path / "out") == 1
    converted(step / "critic", tmp_path / "critic")
    assert value_of(tmp_path / "critic") == 2


@every(
    "pointer, text, model",
    [
        ("latest_checkpointed_iteration.txt", "20", "actor"),
        ("latest_ckpt_global_step.txt", "20", "policy"),
        ("checkpoint_tracker.json", json.dumps({"best_global_step": 30, "last_global_step": 20}), "actor"),
    ],
)
def test_a_run_s_directory_stands_for_the_step_that_its_file_names(
    pointer: str, text: str, model: str, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        save(tmp_path / "run" / f"global_step_{step}" / model, step)
    (tmp_path / "run" / pointer).write_text(text)
    converted(tmp_path / "run", tmp_path / "out")
    assert value_of(tmp_path / "out") == 20
    source = open_source(tmp_path / "run")
    assert list(source.pointers) == [str(tmp_path / "run" / pointer)]
    assert f"Took global_step_20, as {pointer} specifies. Took {model}." in source.notes
    assert list(source.weights) == ["weight"]


@every("text", ["40", "", "[" * 2000])
def test_a_step_that_is_not_there_is_corrupt(text: str, tmp_path: Path) -> None:
    save(tmp_path / "run" / "global_step_10" / "actor")
    (tmp_path / "run" / "checkpoint_tracker.json").write_text(text)
    assert "the directory contains global_step_10" in refused(tmp_path / "run", tmp_path / "out", 4)


def test_one_of_several_steps_has_to_be_named(tmp_path: Path) -> None:
    for step in (9, 10):
        save(tmp_path / "run" / f"global_step_{step}" / "actor", step)
    (tmp_path / "run" / "global_step_11").mkdir()
    message = refused(tmp_path / "run", tmp_path / "out", 2)
    assert "global_step_9, global_step_10" in message
    converted(tmp_path / "run" / "global_step_9", tmp_path / "out")
    assert value_of(tmp_path / "out") == 9


def test_an_optimizer_in_a_directory_of_its_own_is_found(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoint-100"
    save(step / "pytorch_model_fsdp_0")
    write(step / "optimizer", (2,), states, "optimizer_world_size_2_rank_{}.pt")
    run = converted(tmp_path / "run", tmp_path / "out")
    assert str(step / "optimizer") in run.out + run.err
    converted(tmp_path / "run", tmp_path / "again", "--optimizer", tmp_path / "states.safetensors")
    assert_same(load_with_aliases(tmp_path / "states.safetensors"), {"weight.exp_avg": -WEIGHT})


def test_a_whole_model_is_not_mistaken_for_what_lies_below_it(tmp_path: Path) -> None:
    save(tmp_path / "hub" / "actor")
    torch.save({"other": torch.zeros(2)}, tmp_path / "hub" / "pytorch_model.bin")
    assert set(open_source(tmp_path / "hub").weights) == {"other"}


def test_files_that_are_only_numbered_are_ranks_if_they_hold_parts(tmp_path: Path) -> None:
    """torch.distributed.checkpoint's own checkpointer writes checkpoint_0.pt, checkpoint_1.pt …"""

    def part(mesh: Any, rank: int) -> Any:
        return {"weight": placed(WEIGHT, mesh, Shard(0))}

    write(tmp_path / "run", (3,), part, "checkpoint_{}.pt")
    converted(tmp_path / "run", tmp_path / "out")
    assert value_of(tmp_path / "out") == 1
    (tmp_path / "run" / "checkpoint_1.pt").unlink()
    assert "rank 1" in refused(tmp_path / "run", tmp_path / "incomplete", 4)


def test_files_that_are_only_numbered_are_of_several_steps_otherwise(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for step in (0, 1):
        torch.save({"weight": WEIGHT}, tmp_path / "run" / f"checkpoint_{step}.pt")
    assert "convert several:" in ckptconv_here("convert", tmp_path / "run", tmp_path / "out").err


@every("name", ["model.{}.pt", "model_{}-of-2.pt", "rank-0000{}-of-00002.pt"])
def test_a_model_is_told_from_each_rank_s_random_state(name: str, tmp_path: Path) -> None:
    save(tmp_path / "run", name=name)
    for rank in (0, 1):
        torch.save({"rng": torch.full((4,), rank)}, tmp_path / "run" / f"rng_rank_{rank}.pt")
    converted(tmp_path / "run", tmp_path / "out")
    assert value_of(tmp_path / "out") == 1


def test_random_states_do_not_stand_for_a_model_of_another_name(tmp_path: Path) -> None:
    for rank in (0, 1):
        torch.save({"rng": torch.full((4,), rank)}, tmp_path / f"rng_rank_{rank}.pt")
    torch.save({"weight": WEIGHT}, tmp_path / "best.pt")
    assert "best.pt" in refused(tmp_path, tmp_path / "out", 2)
