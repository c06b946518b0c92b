"""Numbered states of optimizers that are named by the weights beside them, or by an order, in checkpoints of torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from cells import VERIFIED
from checkpoints import ckptconv_here, done
from optimizer_files import stepped, training_saved
from reading import states_of
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from ckptconv.process import has_feature


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_a_trainer_s_checkpoint_has_the_order_of_its_architecture(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2}
    llama = {**small, "intermediate_size": 16, "num_hidden_layers": 12, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama))
    optimizer, expected = stepped(model)
    model.save_pretrained(tmp_path / "step")
    torch.save(optimizer.state_dict(), tmp_path / "step" / "optimizer.pt")
    states = ["--states", tmp_path / "step" / "optimizer.pt", "--optimizer-key", "optim"]
    run = done(ckptconv_here("safetensors2dcp", tmp_path / "step", tmp_path / "out", *states))
    assert "--optimizer PATH" not in run.out
    assert_same(states_of(tmp_path / "out"), expected)


def test_a_group_of_muon_has_all_settings_that_torch_s_asks_for(tmp_path: Path) -> None:
    sizes = {"a": (2, 3), "b": (2, 3), "c": (3, 2), "d": (2, 2)}
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()})
    matrices = sorted(model.values(), key=lambda each: each.size(), reverse=True)
    optimizer = torch.optim.Muon(matrices)
    settings = dict.fromkeys(("lr", "weight_decay", "momentum"), 0.1)
    optimizer.param_groups[0] = {**settings, "params": matrices, "use_muon": True}
    for at, each in enumerate(model.values()):
        optimizer.state[each]["momentum_buffer"] = torch.full_like(each, float(at))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "train.pt")
    words = ["--to", "dcp", "--states", tmp_path / "train.pt", "--model-key", "model", "--optimizer-key", "optim"]
    done(ckptconv_here("safetensors2dcp", tmp_path / "train.pt", tmp_path / "dcp", *words))
    known = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert {f"optim.param_groups.0.{key}" for key in torch.optim.Muon(matrices).param_groups[0]} <= known.keys()


def test_what_lies_beside_each_other_by_relative_names_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "qkvo"})
    optimizer, expected = stepped(model)
    monkeypatch.chdir(tmp_path)
    save_file(model.state_dict(), "model.safetensors")
    torch.save(optimizer.state_dict(), "optimizer.pt")
    torch.save(model.state_dict(), "order.pt")
    words = ["safetensors2dcp", "model.safetensors", "out", "--states", "optimizer.pt"]
    ckptconv_here(*words).refused(5, "optimizer.pt: the optimizer numbers its 4 parameters", "--order")
    assert ckptconv_here(*words, "--order", "order.pt").code == 0
    assert_same(states_of("out"), expected)
    if VERIFIED:
        verify = ["verify", "model.safetensors", "out", "--to", "dcp", "--states", "optimizer.pt"]
        ckptconv_here(*verify).refused(5, "--order")
        assert ckptconv_here(*verify, "--order", "order.pt").code == 0
    # The record of a conversion keeps the order.
    assert ckptconv_here("pt2safetensors", "order.pt", "kept.safetensors").code == 0
    run = ckptconv_here("safetensors2dcp", "kept.safetensors", "again", "--states", "optimizer.pt")
    assert "from the order of the state dict" in run.out
    assert_same(states_of("again"), expected)


def test_an_optimizer_without_its_model_is_of_the_input_s(tmp_path: Path) -> None:
    """In a file with other things of a training, and as ColossalAI divides one (checkpoint_io, 0.5.0)."""
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "qkvo"})
    optimizer, expected = stepped(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "order.pt")
    states = optimizer.state_dict()
    rest = {"epoch": 1, "rng": torch.get_rng_state(), "lr_scheduler": {"last_epoch": 1}}
    torch.save({"optimizer": states, **rest}, tmp_path / "state.pt")
    shards = tmp_path / "optimizer"
    shards.mkdir()
    weight_map = {at: f"pytorch_optim-{1 + at // 5:05d}.bin" for at in states["state"]}
    for file in {*weight_map.values()}:
        torch.save({at: states["state"][at] for at, own in weight_map.items() if own == file}, shards / file)
    torch.save(states["param_groups"], shards / "pytorch_optim_group.bin")
    index = {"metadata": {"param_groups": "pytorch_optim_group.bin"}, "weight_map": weight_map}
    (shards / "pytorch_optim.bin.index.json").write_text(json.dumps(index))
    sets = (shards, shards / "pytorch_optim.bin.index.json") if has_feature("torch_shards") else ()
    for at, saved in enumerate((tmp_path / "state.pt", *sets)):
        words = ["safetensors2dcp", tmp_path / "model.safetensors", tmp_path / f"{at}", "--states", saved]
        ckptconv_here(*words).refused(5, "--order")
        assert ckptconv_here(*words, "--order", tmp_path / "order.pt").code == 0
        assert_same(states_of(tmp_path / f"{at}"), expected)
    for groups, code in (("../state.pt", 3), ("nowhere.bin", 4)) if sets else ():
        index["metadata"]["param_groups"] = groups
        (shards / "pytorch_optim.bin.index.json").write_text(json.dumps(index))
        ckptconv_here(*words).refused(code, os.path.basename(groups))


def test_states_of_torchtune_s_modules_are_not_those_of_the_weights_that_it_exports(tmp_path: Path) -> None:
    """Its w1, w2, w3 are gate, down, up: of square matrices, the order of Llama's modules would fit."""
    for name, code in (("model.layers.0.self_attn.q_proj", 5), ("layers.0.attn.q_proj", 0)):
        module = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.AdamW(module.parameters())
        module.weight.grad = torch.ones(4, 4)
        optimizer.step()
        save_file({f"{name}.weight": module.weight.detach()}, tmp_path / "model.safetensors")
        rest = {"epochs_run": 1, "total_epochs": 2, "seed": 0, "max_steps_per_epoch": None}
        torch.save({"optimizer": optimizer.state_dict(), **rest}, tmp_path / "recipe_state.pt")
        words = ["--states", tmp_path / "recipe_state.pt"]
        run = ckptconv_here("safetensors2dcp", tmp_path / "model.safetensors", tmp_path / "out", *words)
        assert run.code == code, run.err
        assert ("torchtune" in run.err) is bool(code)


def test_numbers_that_nothing_names_are_refused(tmp_path: Path) -> None:
    state = training_saved(tmp_path / "t.pt", "numbers")
    state["model"]["3.bias"] = torch.zeros(3)
    torch.save(state, tmp_path / "t.pt")
    words = "numbers its 6 parameters", "The states cannot be matched to parameters", "named_parameters()"
    run = ckptconv_here("safetensors2dcp", tmp_path / "t.pt", tmp_path / "d", "--states", tmp_path / "t.pt")
    run.refused(5, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["t.pt"]


def test_numbered_states_that_fsdp2_cannot_load_are_told(tmp_path: Path) -> None:
    training_saved(tmp_path / "t.pt", "numbers")
    told = f"The optimizer states are numbered, as in {tmp_path / 't.pt'}, but FSDP2 needs names: --states "
    for number, (words, is_told) in enumerate(
        (([], True), (["--states", tmp_path / "t.pt"], False), (["--key", "model"], False))
    ):
        run = done(ckptconv_here("convert", tmp_path / "t.pt", tmp_path / f"{number}", "--to", "dcp", *words))
        assert (told in run.out) == is_told, run.out
