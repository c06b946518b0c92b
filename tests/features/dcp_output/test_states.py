"""The states of optimizers beside weights, which torch loads by the names of these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cells import VERIFY
from checkpoints import assert_same, ckptconv_here, done
from effort import every
from optimizer_files import FORMS, by_name, muon_saved, trained, training_saved
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


@every("form, groups", [(form, groups) for form in FORMS for groups in ((1,) if form == "numbers" else (1, 2))])
def test_states_beside_weights_have_the_names_of_these(form: str, groups: int, tmp_path: Path) -> None:
    state = training_saved(tmp_path / "t.pt", form, groups)
    expected = by_name(state)
    torch.save(state["model"], tmp_path / "model.pt")
    torch.save(state["optimizer"], tmp_path / "optimizer.pt")
    for out, arguments in (
        ("whole", [tmp_path / "t.pt", "--states", tmp_path / "t.pt"]),
        ("apart", [tmp_path / "model.pt", "--model-key", "model", "--states", tmp_path / "optimizer.pt"]),
        ("other", [tmp_path / "model.pt", "--model-key", "model", "--states", tmp_path / "t.pt"]),
    ):
        done(ckptconv_here("safetensors2dcp", *arguments[:1], tmp_path / out, *arguments[1:], *VERIFY))
        model, optimizer = trained(groups, form == "recorded")
        wanted: dict[str, Any] = {"model": model.state_dict()}
        wanted["optimizer"] = get_optimizer_state_dict(model, optimizer)
        for held in wanted["optimizer"]["state"].values():
            held.update({key: torch.zeros_like(value) for key, value in held.items()})
        dcp.load(wanted, checkpoint_id=tmp_path / out)
        assert_same(wanted["model"], state["model"])
        found = wanted["optimizer"]["state"]
        assert_same({f"{name}.{key}": value for name in found for key, value in found[name].items()}, expected)
        set_optimizer_state_dict(model, optimizer, wanted["optimizer"])


def test_named_states_of_another_model_are_refused_or_named(tmp_path: Path) -> None:
    def saved(name: str, **shapes: tuple[int, ...]) -> Path:
        weights = {weight: torch.ones(shape) for weight, shape in shapes.items()}
        states = {weight: {"step": torch.tensor(1.0), "exp_avg": torch.ones(shape)} for weight, shape in shapes.items()}
        groups = [{"lr": 0.1, "params": [*weights]}]
        torch.save({"model": weights, "optimizer": {"state": states, "param_groups": groups}}, tmp_path / name)
        return tmp_path / name

    model = saved("model.pt", a=(4, 6), b=(6,))
    words = ["convert", model, tmp_path / "out", "--to", "dcp", "--key", "model", "--states"]
    ckptconv_here(*words, saved("x.pt", x=(4, 6))).refused(
        5, "the optimizer states of another model: the states belong to 'x'", "'a', 'b'"
    )
    ckptconv_here(*words, saved("small.pt", a=(2, 3), b=(6,))).refused(
        5, "'exp_avg' of 'a' has the shape [2, 3], but its weight has [4, 6]"
    )
    assert not (tmp_path / "out").exists()
    assert "optimizer states of 1 parameter that" in done(ckptconv_here(*words, saved("m.pt", a=(4, 6), c=(2,)))).err
    partial = done(ckptconv_here(*words, saved("part.pt", a=(4, 6)))).err
    assert f"{tmp_path / 'part.pt'} does not list the parameters 'b': these weights of {model} get no" in partial
    # A projection has one side of the weight.
    assert (
        "do not have the shapes of their weights" in done(ckptconv_here(*words, saved("low.pt", a=(2, 6), b=(6,)))).err
    )
    assert "warning" not in done(ckptconv_here(*words, model)).err


def test_two_optimizers_go_on_in_torch_by_way_of_a_checkpoint(tmp_path: Path) -> None:
    expected = muon_saved(tmp_path / "t.pt")
    words = ["--key", "model", "--model-key", "model", "--states", tmp_path / "t.pt", "--optimizer-key", "optim"]
    done(ckptconv_here("safetensors2dcp", tmp_path / "t.pt", tmp_path / "dcp", *words, *VERIFY))
    states = tmp_path / "states.safetensors"
    done(ckptconv_here("dcp2safetensors", tmp_path / "dcp", tmp_path / "model", "--optimizer", states))
    assert_same(load_file(states), expected)
    saved = torch.load(tmp_path / "t.pt")
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(12)), torch.nn.LayerNorm(4))
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon([each for each in model.parameters() if each.ndim == 2]),
        torch.optim.AdamW([each for each in model.parameters() if each.ndim == 1]),
    ]
    whole = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizers)}
    dcp.load(whole, checkpoint_id=tmp_path / "dcp")
    assert_same(whole["model"], saved["model"])
    set_optimizer_state_dict(model, optimizers, whole["optim"])
    held = {parameter: own for each in optimizers for parameter, own in each.state.items()}
    found = {f"{name}.{key}": value for name, each in model.named_parameters() for key, value in held[each].items()}
    assert_same(found, expected)


def test_states_of_no_parameter_of_the_model_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    states = {"state": {"b": {"exp_avg": torch.zeros(2)}}, "param_groups": [{"params": ["b"]}]}
    torch.save(states, tmp_path / "optimizer.pt")
    words = ["safetensors2dcp", tmp_path / "model.safetensors", tmp_path / "out", "--states"]
    ckptconv_here(*words, tmp_path / "optimizer.pt").refused(
        5, "contains states of 'b', but the model has no parameters"
    )
