"""Steps with states that other releases of Megatron-core saved become steps in the newest form of its optimizer."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from checkpoints import ZERO, ckptconv_here, done
from effort import every

import ckptconv

DATA = Path(__file__).parents[1] / "megatron_core/data"
# Of each archive: the name of its directory, and whether it has a second optimizer for experts.
CASES = {
    "flattened_tp2_dp2": False,  # 0.12.3, with states as rows
    "moe_ep2_chained": True,  # 0.12.3
    "reshardable_tp2_dp2": False,  # 0.16.1
    "float16_pp2": False,  # 0.16.1, of an optimizer that is not distributed
    "hashed_tp2_dp2": False,  # 0.19.2
}


def unpacked(case: str, place: Path) -> tuple[Path, dict[str, Any]]:
    with tarfile.open(DATA / f"{case}.tar.xz") as tar:
        tar.extractall(place, filter="data")
    (expected,) = place.rglob("expected.pt")
    return expected.parent / "checkpoint", torch.load(expected, weights_only=True)


def loaded(step: Path) -> dict[str, torch.Tensor]:
    described = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    shapes = {name: saved for name, saved in described.items() if hasattr(saved, "size")}
    tensors = {name: torch.empty(saved.size, dtype=saved.properties.dtype) for name, saved in shapes.items()}
    dcp.load(tensors, checkpoint_id=step, no_dist=True)
    return tensors


@every("case, are_two", CASES.items())
def test_its_states_are_those_that_the_training_held(case: str, are_two: bool, tmp_path: Path) -> None:
    source, expected = unpacked(case, tmp_path / "theirs")
    step = tmp_path / "run/iter_0000020"
    run = done(ckptconv_here("convert", source, step, "--to", "megatron", "--states", source, "--no-fsync"))
    assert "second optimizer" not in run.out
    tensors = loaded(step)
    for name, master in expected["masters"].items():
        assert torch.equal(tensors[f"optimizer.state.param.{name}"], master), name
    for name, state in expected["states"].items():
        parameter, _, key = name.rpartition(".")
        assert torch.equal(tensors[f"optimizer.state.{key}.{parameter}"], state), name
    assert tensors.keys() == {
        *expected["model"],
        *(f"optimizer.state.param.{name}" for name in expected["masters"]),
        *(f"optimizer.state.{key}.{name}" for name, _, key in (name.rpartition(".") for name in expected["states"])),
    }
    common = torch.load(step / "common.pt", weights_only=False)
    optimizers = [common["optimizer"][number] for number in (0, 1)] if are_two else [common["optimizer"]]
    assert len(common["optimizer"]) == 2
    for number, optimizer in enumerate(optimizers):
        assert optimizer.keys() == {"optimizer", "param_state_sharding_type"}
        assert optimizer["param_state_sharding_type"] == "fully_reshardable"
        flags = {(group["is_expert_parallel"], group["step"]) for group in optimizer["optimizer"]["param_groups"]}
        assert flags == {(number == 1, 2.0)}


def test_the_step_and_the_loss_scale_of_an_optimizer_that_is_not_distributed_are_kept(tmp_path: Path) -> None:
    source, _ = unpacked("float16_pp2", tmp_path / "theirs")
    common = torch.load(source / "iter_0000020/common.pt", weights_only=False)
    scaling = {"scale": torch.tensor([65536.0]), "growth_tracker": 7, "hysteresis_tracker": 2}
    # Where all parameters are fp32, their optimizer's values have no further level.
    for name, optimizer in {"half": {**common["optimizer"], "grad_scaler": scaling}, **common["optimizer"]}.items():
        torch.save({**common, "optimizer": optimizer}, source / "iter_0000020/common.pt")
        step = tmp_path / name / "iter_0000020"
        run = done(ckptconv_here("convert", source, step, "--to", "megatron", "--states", source, "--no-fsync"))
        assert "Left out" not in run.err
        written = torch.load(step / "common.pt", weights_only=False)["optimizer"]
        assert [group["step"] for group in written["optimizer"]["param_groups"]] == [2.0, 2.0]
        assert written.get("grad_scaler") == (scaling if name == "half" else None)


def with_groups(values: Any, **change: Any) -> Any:
    for group in values["optimizer"]["optimizer"]["param_groups"][: change.pop("first", None)]:
        group.update(change)
    return values


# Changes to the values that all ranks share, and what is said of each.
ODD_VALUES: dict[str, tuple[Any, str]] = {
    "steps": (lambda values: with_groups(values, first=1, step=3.0), "have the step counts 3.0, 2.0"),
    "half a step": (lambda values: with_groups(values, step=2.5), "have the step counts 2.5, 2.5"),
    "no number": (lambda values: with_groups(values, step=float("nan")), "have the step counts nan, nan"),
    "too large": (lambda values: with_groups(values, step=1e300), "have the step counts 1e+300, 1e+300"),
    "below zero": (lambda values: with_groups(values, step=-1), "have the step counts -1, -1"),
    "text": (lambda values: with_groups(values, step="2"), "have the step counts '2', '2'"),
    "a list": (lambda values: {**values, "optimizer": [1]}, "step counts of the parameters are missing"),
    "no values": (lambda values: {**values, "optimizer": {0: None}}, "step counts of the parameters are missing"),
}


@every("change, said", ODD_VALUES.values(), ids=ODD_VALUES)
def test_an_optimizer_whose_step_is_not_known_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    source, _ = unpacked("reshardable_tp2_dp2", tmp_path)
    path = source / "iter_0000020/common.pt"
    torch.save(change(torch.load(path, weights_only=False)), path)
    words = ("convert", source, tmp_path / "iter_0000020", "--to", "megatron", "--states", source)
    run = ckptconv_here(*words)
    assert (run.code, said in run.err) == (5, True), run.err


def test_groups_are_told_apart_by_the_names_of_nemo_too(tmp_path: Path) -> None:
    source, _ = unpacked("reshardable_tp2_dp2", tmp_path)
    path = source / "iter_0000020/common.pt"
    common = torch.load(path, weights_only=False)
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        group["pre_wd_mult"] = group.pop("wd_mult")
    torch.save(common, path)
    step = tmp_path / "run/iter_0000020"
    done(ckptconv_here("convert", source, step, "--to", "megatron", "--states", source, "--no-fsync"))
    groups = torch.load(step / "common.pt", weights_only=False)["optimizer"]["optimizer"]["param_groups"]
    assert [group["pre_wd_mult"] for group in groups] == [1.0, 0.0]


def test_arguments_that_the_tensors_contradict_are_set_by_these(tmp_path: Path) -> None:
    source, _ = unpacked("reshardable_tp2_dp2", tmp_path)
    path = source / "iter_0000020/common.pt"
    common = torch.load(path, weights_only=False)
    vars(common["args"]).update(num_layers=7, untie_embeddings_and_output_weights=False, padded_vocab_size=99)
    torch.save(common, path)
    run = done(ckptconv_here("convert", source, tmp_path / "run", "--to", "megatron", "--no-fsync"))
    assert "num_layers (7, now 2)" in run.out
    args = torch.load(tmp_path / "run/release/common.pt", weights_only=False)["args"]
    assert (args.num_layers, args.untie_embeddings_and_output_weights, args.padded_vocab_size) == (2, True, 16)


def test_the_states_of_deepspeed_are_those_of_its_checkpoint(tmp_path: Path) -> None:
    source = ZERO / "z1_bf16_w2" / "checkpoint"
    chosen: dict[str, Any] = {"include": ["*.weight", "*.bias"], "states": source, "fsync": False}
    ckptconv.convert(source, tmp_path / "run/iter_0000003", to="megatron", **chosen)
    ckptconv.convert(source, tmp_path / "dcp", to="dcp", **chosen)
    ours, theirs = loaded(tmp_path / "run/iter_0000003"), loaded(tmp_path / "dcp")
    moments = [name for name in theirs if name.endswith((".exp_avg", ".exp_avg_sq"))]
    assert moments
    for name in moments:
        parameter, _, key = name.removeprefix("optimizer.state.").rpartition(".")
        assert torch.equal(ours[f"optimizer.state.{key}.{parameter}"], theirs[name]), name
        assert torch.equal(ours[f"optimizer.state.param.{parameter}"], theirs[parameter]), name
        assert theirs[parameter].dtype == torch.float32
    common = torch.load(tmp_path / "run/iter_0000003/common.pt", weights_only=False)
    steps = {group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]}
    assert steps == {3}
