"""States of numbered parameters: whole ones keep their numbers, and pieces of FSDP1's flat parameters are refused."""

from __future__ import annotations

from pathlib import Path

import torch
from effort import every
from features.dcp.cases import MODEL, converted, refused, saved
from safetensors.torch import load_file


def adam(*lengths: int) -> dict[str, torch.Tensor]:
    return dict(zip(("exp_avg", "exp_avg_sq"), map(torch.ones, lengths), strict=True))


# Two ranks have 20 elements of a flat parameter each; torch may keep different ranks' pieces of the two states.
@every("states", [(adam(20, 20), adam(8, 8)), (adam(20, 12),), (adam(20, 20),)])
def test_pieces_of_a_flat_parameter_are_refused_and_the_model_is_converted(
    states: tuple[dict[str, torch.Tensor], ...], tmp_path: Path
) -> None:
    source = saved(tmp_path / "in", *states)
    said = refused(source, tmp_path / "weights", 5, "--optimizer", tmp_path / "states")
    assert "'optimizer.state.0.exp_avg'" in said
    assert "FSDP.optim_state_dict" in said
    assert not (tmp_path / "states").exists()
    converted(source, tmp_path / "weights.safetensors")
    assert torch.equal(load_file(tmp_path / "weights.safetensors")["weight"], MODEL["weight"])


@every(
    "states",
    [{"d": torch.ones(40), "prev_flat_grad": torch.ones(40)}, {}],
    ids=["LBFGS", "steps alone"],
)
def test_whole_states_without_a_known_parameter_keep_their_numbers(
    states: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    output = tmp_path / "states.safetensors"
    said = converted(saved(tmp_path / "in", states), "--optimizer", output)
    assert set(load_file(output)) == {f"0.{name}" for name in ("step", *states)}
    assert "parameter numbers, because" in said.out


def test_without_a_model_vectors_are_refused_only_if_several_ranks_may_have_saved_them(tmp_path: Path) -> None:
    output = tmp_path / "states.safetensors"
    states = adam(20, 20), adam(8, 8)
    converted(saved(tmp_path / "one", *states, model=None), "--optimizer", output)
    output.unlink()
    refused(saved(tmp_path / "several", *states, model=None, files=2), output, 5, "--optimizer", output)
    matrix = {"exp_avg": torch.ones(8, 4)}
    converted(saved(tmp_path / "matrix", *states, matrix, model=None, files=2), "--optimizer", output)
