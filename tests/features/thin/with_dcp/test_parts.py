"""Parts of a step of torch.distributed.checkpoint that a reduced step would lack."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from features.thin.reduced import kept, reduced

import ckptconv
from ckptconv.formats.registered import DESCRIBING

WEIGHTS = {f"layers.{at}.weight": torch.full((8, 8), float(at)) for at in range(3)}
OPTIMIZER = {
    "state": {name: {"exp_avg": tensor + 1, "step": torch.tensor(3.0)} for name, tensor in WEIGHTS.items()},
    "param_groups": [{"lr": 1e-3, "params": [*WEIGHTS]}],
}
NESTED = {"model": WEIGHTS, "optim": OPTIMIZER}
# As torchtitan: names of the model at the top, and one key for each state.
FLAT = {**WEIGHTS, **{f"optimizer.state.{name}.exp_avg": tensor + 1 for name, tensor in WEIGHTS.items()}}
TRAIN_STATE = {"step": torch.tensor(100), "ntokens_seen": torch.tensor(100_000), "loss": torch.tensor(0.5)}
REDUCING = [
    ("--drop", "optimizer"),
    ("--as", "bf16"),
    *([("--as", "delta")] if hasattr(ckptconv, "patch") and DESCRIBING else []),
]


def _run(place: Path, state: dict[str, Any]) -> Path:
    for number in (100, 200):
        dcp.save({**state, "epoch": number}, checkpoint_id=place / f"step-{number}", no_dist=True)
    return place


@pytest.mark.parametrize("options", REDUCING)
@pytest.mark.parametrize("state", [NESTED, FLAT], ids=["nested", "flat"])
@pytest.mark.filterwarnings("ignore")
def test_a_step_with_an_average_of_the_weights_stays(
    options: tuple[str, ...], state: dict[str, Any], tmp_path: Path
) -> None:
    average = {name: tensor / 2 for name, tensor in WEIGHTS.items()}
    # Of a model whose names are at the top, its modules are not distinguished from parts without such names.
    run = _run(tmp_path / "run", {**state, ("ema" if state is NESTED else "train_state"): average})
    before = {path.name: path.read_bytes() for path in (run / "step-100").iterdir()}
    assert reduced(run, *options) == kept("ema" if state is NESTED else "train_state")
    assert {path.name: path.read_bytes() for path in (run / "step-100").iterdir()} == before


@pytest.mark.parametrize("options", REDUCING)
@pytest.mark.filterwarnings("ignore")
def test_parts_without_weights_are_named_before_they_go(options: tuple[str, ...], tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {**NESTED, "train_state": TRAIN_STATE, "rng": torch.get_rng_state()})
    assert reduced(run, *options) == {"action": "lessen", "why": [], "lost": ["train_state", "rng", "epoch"]}
    assert {*ckptconv.open(run / "step-100").keys()} == {*WEIGHTS}


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_was_pickled_whole_next_to_the_weights_keeps_the_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number in (100, 200):
        step = run / f"step-{number}"
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        state = {**WEIGHTS, "ema": {name: tensor / 2 for name, tensor in WEIGHTS.items()}}
        dcp.save(state, checkpoint_id=step, planner=planner, no_dist=True)
    assert reduced(run) == kept("ema")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(("--as", "delta") not in REDUCING, reason="deltas were left out")
def test_a_delta_has_the_other_values_of_its_own_step(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", FLAT)
    shutil.copytree(run, tmp_path / "before")
    assert reduced(run, "--as", "delta")["lost"] == []
    assert ckptconv.open(run / "step-100").source.weights["epoch"] == 100
    assert ckptconv.diff(run / "step-100", tmp_path / "before" / "step-100").equal
