"""States of numbered parameters: whole ones keep their numbers, and pieces of FSDP1's flat parameters are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dist_checkpoint
from effort import every
from features.dcp.cases import converted, refused
from safetensors.torch import load_file

from ckptconv.outputs.kinds import FURTHER

MODEL = {"weight": torch.arange(32.0).reshape(8, 4), "bias": torch.arange(8.0), "count": torch.tensor(3)}


def checkpoint_with(directory: Path, *states: dict[str, torch.Tensor], model: Any = MODEL, files: int = 1) -> Path:
    """A checkpoint of `model` and of an optimizer that has these states of parameter 0, 1, …"""
    state = {number: {"step": torch.tensor(2.0), **own} for number, own in enumerate(states)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}
    whole = {"optimizer": optimizer, **({"model": model} if model else {})}
    writer = dist_checkpoint.FileSystemWriter(directory, thread_count=files)
    dist_checkpoint.save(whole, storage_writer=writer, no_dist=True)
    return directory


def adam(*lengths: int) -> dict[str, torch.Tensor]:
    return dict(zip(("exp_avg", "exp_avg_sq"), map(torch.ones, lengths), strict=True))


# Two ranks have 20 elements of a flat parameter each; torch may keep different ranks' pieces of the two states.
@every("states", [(adam(20, 20), adam(8, 8)), (adam(20, 12),), (adam(20, 20),)])
def test_pieces_of_a_flat_parameter_are_refused_and_the_model_is_converted(
    states: tuple[dict[str, torch.Tensor], ...], tmp_path: Path
) -> None:
    source = checkpoint_with(tmp_path / "in", *states)
    said = refused(source, tmp_path / "weights", 5, "--optimizer", tmp_path / "states")
    assert "'optimizer.state.0.exp_avg'" in said
    assert "FSDP.optim_state_dict" in said
    assert not (tmp_path / "states").exists()
    converted(source, tmp_path / "weights.safetensors")
    assert torch.equal(load_file(tmp_path / "weights.safetensors")["weight"], MODEL["weight"])


@pytest.mark.parametrize(
    ("states", "names"),
    [
        pytest.param(({"exp_avg": torch.ones(8, 4)}, {"exp_avg": torch.ones(8)}), "weight bias", id="of parameters"),
        pytest.param(({"momentum_buffer": torch.ones(8)},), "bias", id="of a vector alone"),
        pytest.param(
            ({"row": torch.ones(8), "col": torch.ones(4)}, {"sq": torch.ones(8)}), "weight bias", id="factored"
        ),
        pytest.param(({"d": torch.ones(40), "prev_flat_grad": torch.ones(40)},), "0", id="LBFGS"),
        pytest.param(({"state1": torch.ones(8, 4), "absmax1": torch.ones(3)},), "weight", id="quantized"),
        pytest.param(({},), "0", id="steps alone"),
    ],
)
def test_whole_states_get_names_or_keep_their_numbers(
    states: tuple[dict[str, torch.Tensor], ...], names: str, tmp_path: Path
) -> None:
    output = tmp_path / "states.safetensors"
    said = converted(checkpoint_with(tmp_path / "in", *states), "--optimizer", output)
    expected = {
        f"{called}.{name}" for called, own in zip(names.split(), states, strict=True) for name in ("step", *own)
    }
    assert set(load_file(output)) == expected
    assert ("numbers instead of names, because" in said.out) == names.isdecimal()


def test_without_a_model_vectors_are_refused_only_if_several_ranks_may_have_saved_them(tmp_path: Path) -> None:
    output = tmp_path / "states.safetensors"
    states = adam(20, 20), adam(8, 8)
    converted(checkpoint_with(tmp_path / "one", *states, model=None), "--optimizer", output)
    output.unlink()
    refused(checkpoint_with(tmp_path / "several", *states, model=None, files=2), output, 5, "--optimizer", output)
    matrix = {"exp_avg": torch.ones(8, 4)}
    converted(checkpoint_with(tmp_path / "matrix", *states, matrix, model=None, files=2), "--optimizer", output)


def test_numbers_of_equal_shapes_get_names_by_an_order_or_none(tmp_path: Path) -> None:
    model = {"a": torch.zeros(4), "b": torch.ones(4)}
    states = ({"exp_avg": torch.full((4,), 1.0)}, {"exp_avg": torch.full((4,), 2.0)})
    source = checkpoint_with(tmp_path / "in", *states, model=model)
    for name in FURTHER:
        if name == "optimizer":  # whose numbers stay
            continue
        assert "--order" in refused(source, tmp_path / "out", 5, f"--{name}", tmp_path / "u")
    (tmp_path / "order.txt").write_text("b\na\n")
    output = tmp_path / "states.safetensors"
    converted(source, "--optimizer", output, "--order", tmp_path / "order.txt")
    found = load_file(output)
    assert [float(found[f"{name}.exp_avg"][0]) for name in "ba"] == [1.0, 2.0]
    # What one process saved in an order that is no sorted one, is in it.
    source = checkpoint_with(
        tmp_path / "kept", *states, model={"b": model["b"], "x": torch.ones(2, 2), "a": model["a"]}
    )
    run = converted(source, "--optimizer", tmp_path / "kept.safetensors")
    assert "were found by the order of the checkpoint" in run.out
    assert float(load_file(tmp_path / "kept.safetensors")["b.exp_avg"][0]) == 1.0
