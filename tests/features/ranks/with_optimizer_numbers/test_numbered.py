"""States of numbered parameters in files of ranks: named by shapes or an order, or refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from checkpoints import assert_same, load_with_aliases
from dtensors import placed
from effort import every
from features.ranks.rank_files import NUMBERED, RANKS, converted, refused, write
from features.ranks.test_ranks import OTHER, WEIGHT, trained
from safetensors.torch import load_file
from torch.distributed.tensor import Shard


@every("case", NUMBERED)
def test_states_are_what_the_live_model_held(case: str, tmp_path: Path) -> None:
    states = tmp_path / "states.safetensors"
    converted(RANKS / case / "checkpoint", "--optimizer", states)
    assert_same(load_with_aliases(states), load_file(RANKS / case / "optimizer.safetensors"))


def adam(mesh: Any, *tensors: torch.Tensor) -> dict[str, Any]:
    """An optimizer's state of numbered parameters."""
    state = {number: {"step": torch.tensor(2.0), "exp_avg": tensor} for number, tensor in enumerate(tensors)}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(range(len(tensors)))}]}


def test_numbered_states_are_of_the_parameters_of_their_shapes_with_frozen_ones_left_out(tmp_path: Path) -> None:
    source = trained(
        tmp_path,
        lambda mesh, rank: adam(mesh, *(placed(each, mesh, Shard(0)) for each in (OTHER, OTHER.T.contiguous()))),
    )
    converted(source, tmp_path / "out", "--optimizer", tmp_path / "states.safetensors")
    found = load_file(tmp_path / "states.safetensors")
    assert_same(
        {name: found[name] for name in ("a.exp_avg", "b.exp_avg")},
        {"a.exp_avg": OTHER, "b.exp_avg": OTHER.T.contiguous()},
    )
    assert set(found) == {f"{name}.{state}" for name in "ab" for state in ("exp_avg", "step")}


def grouped(mesh: Any, *groups: list[torch.Tensor]) -> dict[str, Any]:
    """An optimizer's state of parameters that are numbered through several groups."""
    state = adam(mesh, *(placed(each, mesh, Shard(0)) for group in groups for each in group))
    first = [sum(map(len, groups[:number])) for number in range(len(groups) + 1)]
    state["param_groups"] = [{"lr": 0.1, "params": list(range(*pair))} for pair in itertools.pairwise(first)]
    return state


def test_numbered_states_in_several_groups_are_assigned_if_the_shapes_allow_one_way(tmp_path: Path) -> None:
    turned = OTHER.T.contiguous()
    source = trained(tmp_path, lambda mesh, rank: grouped(mesh, [turned], [WEIGHT, OTHER]))
    converted(source, tmp_path / "out", "--optimizer", tmp_path / "states.safetensors")
    found = load_file(tmp_path / "states.safetensors")
    expected = {"b.exp_avg": turned, "frozen.exp_avg": WEIGHT, "a.exp_avg": OTHER}
    assert_same({name: found[name] for name in expected}, expected)


def test_numbered_states_in_several_groups_of_equal_shapes_are_refused(tmp_path: Path) -> None:
    def model(mesh: Any, rank: int) -> dict[str, Any]:
        return {name: placed(OTHER, mesh, Shard(0)) for name in "ab"}

    source = write(tmp_path / "in", (2,), model)
    write(source, (2,), lambda mesh, rank: grouped(mesh, [OTHER], [OTHER]), name="optim_rank{}.pt")
    assert "in 2 groups" in refused(source, tmp_path / "out", 5, "--optimizer", tmp_path / "states.safetensors")
    (tmp_path / "order.json").write_text('[["b"], ["a"]]')
    converted(
        source, tmp_path / "out", "--optimizer", tmp_path / "states.safetensors", "--order", tmp_path / "order.json"
    )
    assert set(load_file(tmp_path / "states.safetensors")) == {
        f"{name}.{state}" for name in "ab" for state in ("exp_avg", "step")
    }


def test_factors_of_a_square_parameter_are_not_taken_for_states_of_a_vector(tmp_path: Path) -> None:
    def model(mesh: Any, rank: int) -> dict[str, Any]:
        return {"norm": placed(torch.zeros(4), mesh, Shard(0)), "square": placed(torch.zeros(4, 4), mesh, Shard(0))}

    def optimizer(mesh: Any, rank: int) -> dict[str, Any]:
        factors = {f"exp_avg_sq_{each}": placed(torch.ones(4), mesh, Shard(0)) for each in ("row", "col")}
        return {"state": {0: {"step": 1, **factors}}, "param_groups": [{"lr": 0.1, "params": [0]}]}

    source = write(tmp_path / "in", (2,), model)
    write(source, (2,), optimizer, name="optim_rank{}.pt")
    error = refused(source, tmp_path / "out", 5, "--optimizer", tmp_path / "states.safetensors")
    assert ", so the states cannot be matched to parameters. " in error


def test_numbered_states_may_be_of_parameters_that_are_not_distributed(tmp_path: Path) -> None:
    """As norms are under tensor parallelism. Buffers are whole on each rank too."""
    norm, scale = torch.ones(5), torch.tensor(2.0)

    def model(mesh: Any, rank: int) -> dict[str, Any]:
        weight = placed(WEIGHT, mesh, Shard(0))
        return {"count": torch.tensor(3), "rope": torch.ones(2), "weight": weight, "scale": scale, "norm": norm}

    source = write(tmp_path / "in", (2,), model)
    write(
        source,
        (2,),
        lambda mesh, rank: adam(mesh, placed(-WEIGHT, mesh, Shard(0)), -scale, -norm),
        name="optim_rank{}.pt",
    )
    converted(source, tmp_path / "out", "--optimizer", tmp_path / "states.safetensors")
    found = load_file(tmp_path / "states.safetensors")
    expected = {"weight": -WEIGHT, "scale": -scale, "norm": -norm}
    assert_same({name: found[f"{name}.exp_avg"] for name in expected}, expected)


def test_a_plain_state_that_may_be_of_either_kind_of_parameter_is_refused(tmp_path: Path) -> None:
    def model(mesh: Any, rank: int) -> dict[str, Any]:
        return {"spread": placed(torch.ones(4), mesh, Shard(0)), "norm": torch.ones(4)}

    source = write(tmp_path / "in", (2,), model)
    write(source, (2,), lambda mesh, rank: adam(mesh, torch.ones(4)), name="optim_rank{}.pt")
    assert "numbered parameters" in refused(source, tmp_path / "out", 5, "--optimizer", tmp_path / "states.safetensors")


def test_states_whose_parameters_cannot_be_told_do_not_keep_the_weights_from_being_converted(tmp_path: Path) -> None:
    """Flat parameters of FSDP1: each state is a piece of several parameters."""
    source = trained(tmp_path, lambda mesh, rank: adam(mesh, torch.ones(28), torch.ones(7)))
    told = refused(source, tmp_path / "out", 5, "--optimizer", tmp_path / "states.safetensors")
    assert "numbered parameters" in told
    assert "optim_state_dict" in told
    converted(source, tmp_path / "out")
