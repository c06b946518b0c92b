"""The orders that architectures and state dicts tell, held to transformers' modules and to torch's."""

from __future__ import annotations

import json
import random
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFY, verified_here
from checkpoints import ckptconv_here
from effort import every
from optimizer_files import stepped
from reading import states_of
from safetensors.torch import load_file, save_file
from torch import nn

from ckptconv import UsageError, convert
from ckptconv.features.optimizer_numbers import orders
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import FURTHER

transformers = pytest.importorskip("transformers")

# Sorted by size, they are c, a, b, d.
MATRICES = {"a": (2, 3), "b": (2, 3), "c": (3, 2), "d": (2, 2)}
SMALL = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2}


def models() -> dict[str, Any]:
    """Models whose layers are of equal shapes, in 11 or 12 layers: sorted names have another order."""
    llama = {**SMALL, "intermediate_size": 16, "num_hidden_layers": 12, "num_key_value_heads": 2}
    gpt2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 11, "n_head": 2, "n_positions": 16}
    return {
        "LlamaForCausalLM": transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama)),
        "tied": transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama, tie_word_embeddings=True)),
        "Qwen2ForCausalLM": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**llama)),
        "GPT2LMHeadModel": transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2)),
        "BertForMaskedLM": transformers.BertForMaskedLM(
            transformers.BertConfig(**SMALL, intermediate_size=16, num_hidden_layers=11)
        ),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_a_trainer_s_checkpoint_has_the_order_of_its_architecture(tmp_path: Path) -> None:
    for name, model in models().items():
        step = tmp_path / name
        model.save_pretrained(step)
        optimizer, expected = stepped(model)
        model.save_pretrained(step)
        torch.save(optimizer.state_dict(), step / "optimizer.pt")
        run = ckptconv_here("convert", step, tmp_path / f"{name}-out", "--optimizer", tmp_path / f"{name}.safetensors")
        assert run.code == 0, run.err
        assert "parameters were derived from" in run.out
        assert_same(load_file(tmp_path / f"{name}.safetensors"), expected)
        # The weights alone, and without any order.
        run = ckptconv_here("convert", step, tmp_path / f"{name}-alone")
        assert "optimizer.pt. Use convert --optimizer PATH for its states" in run.out
        shutil.copy(step / "config.json", tmp_path / "config.json")
        told = json.loads((step / "config.json").read_text())
        (step / "config.json").write_text(json.dumps({**told, "auto_map": {"AutoModel": "own.Model"}}))
        ckptconv_here("convert", step, "--optimizer", tmp_path / "no").refused(5, "refers to custom model code,")
        (step / "config.json").unlink()
        for option in FURTHER:
            run = ckptconv_here("convert", step, f"--{option}", tmp_path / "no")
            said = run.refused(5, f"Not converted: the states in {step / 'optimizer.pt'}.", "--order")
            assert "zero moments at step 0" not in said
        order = ["--order", tmp_path / "config.json"]
        run = ckptconv_here("convert", step, "--optimizer", tmp_path / f"{name}-asked.safetensors", *order)
        assert run.code == 0, run.err
        assert_same(load_file(tmp_path / f"{name}-asked.safetensors"), expected)


def test_adapters_have_the_order_of_their_base(tmp_path: Path) -> None:
    model = models()["LlamaForCausalLM"]
    model.save_pretrained(tmp_path / "base")
    modules = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(12) for name in "qkvo"]
    factors = {f"base_model.model.{each}.lora_{half}.weight": half for each in modules for half in "AB"}
    named = {name: nn.Parameter(torch.zeros((2, 16) if half == "A" else (16, 2))) for name, half in factors.items()}
    optimizer = torch.optim.AdamW(named.values())
    for at, parameter in enumerate(named.values()):
        parameter.grad = torch.full_like(parameter, at + 1.0)
    optimizer.step()
    step = tmp_path / "checkpoint-1"
    step.mkdir()
    save_file({name: each.detach() for name, each in named.items()}, step / "adapter_model.safetensors")
    torch.save(optimizer.state_dict(), step / "optimizer.pt")
    expected = {f"{name}.{key}": value for name, each in named.items() for key, value in optimizer.state[each].items()}
    config = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "base")}
    out = tmp_path / "out.safetensors"
    for told, words in (
        (config, []),
        ({**config, "base_model_name_or_path": "some/where"}, ["--order", tmp_path / "base"]),
        ({"auto_mapping": {"base_model_class": "LlamaForCausalLM"}}, []),
    ):
        (step / "adapter_config.json").write_text(json.dumps(told))
        run = ckptconv_here("convert", step, "--optimizer", out, *words)
        assert run.code == 0, run.err
        assert_same(load_file(out), expected)
        out.unlink()
    (step / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "some/where"}))
    ckptconv_here("convert", step, "--optimizer", out).refused(5, "specifies no local base model")
    # What the running model calls its parameters, the frozen ones of the base with them.
    names = [name.replace("A.weight", "A.default.weight").replace("B.weight", "B.default.weight") for name in named]
    frozen = [f"base_model.model.{each}.base_layer.weight" for each in modules]
    (tmp_path / "order.txt").write_text("\n".join([*frozen, *names]))
    assert ckptconv_here("convert", step, "--optimizer", out, "--order", tmp_path / "order.txt").code == 0
    assert_same(load_file(out), expected)


def test_accelerate_s_several_optimizers_share_the_parameters(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "qkvo"})
    split = [[each for each in model.parameters() if each.ndim == dims] for dims in (2, 1)]
    optimizers = [torch.optim.Muon(split[0]), torch.optim.AdamW(split[1])]
    for at, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, at + 1.0)
    for number, optimizer in enumerate(optimizers):
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / f"optimizer{f'_{number}' if number else ''}.bin")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    held = {parameter: own for each in optimizers for parameter, own in each.state.items()}
    expected = {f"{name}.{key}": value for name, each in model.named_parameters() for key, value in held[each].items()}
    assert_same(states_of(tmp_path), expected)


def test_buffers_that_are_certain_are_no_parameters(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    for at, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, at + 1.0)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "t.pt")
    named = model.named_parameters()
    expected = {f"{name}.{key}": value for name, each in named for key, value in optimizer.state[each].items()}
    assert_same(states_of(tmp_path / "t.pt"), expected)


def kept(names: str, modules: str | None = None) -> bool:
    tree: Any = OrderedDict((name, nn.Parameter(torch.zeros(2))) for name in names.split())
    if modules is not None:
        tree._metadata = OrderedDict((name, {"version": 1}) for name in modules.split(","))
    return orders.follows_modules(tree, getattr(tree, "_metadata", None))


def test_an_order_is_known_if_no_sorting_makes_it() -> None:
    assert kept("b a c")
    assert kept("head x b.w a.w a.c.w c.w")
    for names in (
        "a",
        "a b",
        "c b a",
        "1.w 2.w 10.w",
        "b.w a.w b.c",
        "c a.c.w a.w b",
        "b a.c.w a.w",
        "b.w a.w a.c.w head",
    ):
        assert not kept(names), names
    assert kept("0.weight 0.bias 1.weight", ",0,1")
    assert kept("0.weight 1.weight", ",0,1")
    assert not kept("0.weight 1.weight", ",1,0")
    assert not kept("0.weight 1.weight", ",0")
    assert not kept("0.bias 0.weight 1.weight", ",0,1"), "sorted, and torch's modules have weights first"


def test_the_catalogue_puts_names_in_order_only_if_it_knows_them_all() -> None:
    model = models()["GPT2LMHeadModel"]
    names = [name for name, _ in model.named_parameters()]
    mixed = random.Random(1).sample(names, len(names))
    assert orders.in_order("GPT2LMHeadModel", mixed) == names
    assert orders.in_order("GPT2LMHeadModel", [*mixed, "transformer.h.0.attn.bias"]) == []
    assert not orders.is_known("NoSuchModel")


@every(
    "text, code, words",
    [
        ("", 2, "neither a list of names"),
        ("[1, 2]", 2, "neither a list of names"),
        ("[[", 2, "not JSON"),
        ("0.weight\n0.weight", 2, "more than once"),
        ("nowhere", 5, "/order fits the shapes of the states in no way"),
        ('[["0.weight"], ["0.bias"]]', 5, "in no way"),
        ("0.bias\n0.weight", 5, "in no way"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(text: str, code: int, words: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "t.pt")
    (tmp_path / "order").write_text(text)
    run = ckptconv_here("convert", tmp_path / "t.pt", "--optimizer", tmp_path / "s", "--order", tmp_path / "order")
    run.refused(code, words)
    with pytest.raises(
        UsageError, match=r"is a list, but a path was expected.*Write the names to a file with json\.dump"
    ):
        convert(tmp_path / "t.pt", optimizer=tmp_path / "s", order=[["a"], ["b"]])  # type: ignore[arg-type]
    missing = ["--order", tmp_path / "no"]
    ckptconv_here("convert", tmp_path / "t.pt", "--optimizer", tmp_path / "s", *missing).refused(2, "does not exist")
    run = ckptconv_here("convert", tmp_path / "t.pt", tmp_path / "w.safetensors", "--order", tmp_path / "t.pt")
    assert "--order has" in run.err


@every("grouped", [False, True])
def test_only_names_that_decide_are_asked_for_when_an_order_leaves_a_choice(grouped: bool, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    parts = [[*model[layer].parameters()] for layer in (1, 3)]
    optimizer = torch.optim.AdamW([{"params": part} for part in parts] if grouped else [*parts[0], *parts[1]])
    for at, parameter in enumerate([*parts[0], *parts[1]]):
        parameter.grad = torch.full_like(parameter, at + 1.0)
    optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "t.pt")
    torch.save(model.state_dict(), tmp_path / "sd.pt")
    (tmp_path / "all.txt").write_text("\n".join(names.values()))
    command = "convert", tmp_path / "t.pt", tmp_path / "w.safetensors", "--optimizer", tmp_path / "s.safetensors"
    for words in ([], ["--order", tmp_path / "all.txt"], ["--order", tmp_path / "sd.pt"]):
        said = ckptconv_here(*command, *words).refused(5, "in more than one way", "json.dump(")
        assert ("only, in the optimizer's order, one per line" in said) is not grouped
        assert not any(way in said for way in ("state_dict() saved", "config.json", "model.named_parameters(), one"))
    if grouped:
        text = json.dumps([[names[parameter] for parameter in part] for part in parts])
    else:
        text = "\n".join(names[parameter] for part in parts for parameter in part)
    (tmp_path / "order").write_text(text)
    run = ckptconv_here(*command, "--order", tmp_path / "order")
    assert run.code == 0, run.err
    held = {f"{names[each]}.{key}": value for each, state in optimizer.state.items() for key, value in state.items()}
    assert_same(load_file(tmp_path / "s.safetensors"), held)


def test_a_way_that_was_tried_is_not_advised_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer, _ = stepped(model)
    shuffled = {name: model.state_dict()[name] for name in ("1.bias", "0.weight", "0.bias", "1.weight")}
    torch.save({"model": shuffled, "optimizer": optimizer.state_dict()}, tmp_path / "t.pt")
    (tmp_path / "names").write_text("0.bias\n0.weight")
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    ways = {
        "names": "a file with the names of model.named_parameters(), one per line",
        "t.pt": "a checkpoint of model.state_dict()",
        "config.json": "the config.json of a transformers model",
    }
    for tried, own in ways.items():
        command = "convert", tmp_path / "t.pt", tmp_path / "w.safetensors", "--optimizer", tmp_path / "s.safetensors"
        run = ckptconv_here(*command, "--order", tmp_path / tried)
        assert run.code in (2, 5)
        assert [way for way in ways.values() if way not in run.err] == [own], run.err


def test_what_tells_an_order_is_an_input(tmp_path: Path) -> None:
    """Two parts of different orders do not make one output, and an output of another order is not verified."""
    step, names = tmp_path / "step", tmp_path / "order.txt"
    model = models()["LlamaForCausalLM"]
    model.save_pretrained(step)
    optimizer, _ = stepped(model)
    torch.save(optimizer.state_dict(), step / "optimizer.pt")
    config = (step / "config.json").read_text()
    in_order = "\n".join(name for name, _ in model.named_parameters())
    other_names = in_order.replace("layers.0.", "layers.X.").replace("layers.1.", "layers.0.").replace(".X.", ".1.")
    cases = {
        step / "config.json": (config, config.replace("LlamaForCausalLM", "MistralForCausalLM"), []),
        names: (in_order, other_names, ["--order", names]),
    }
    for at, (file, (one, other, words)) in enumerate(cases.items()):
        out, parts = tmp_path / f"{at}", tmp_path / f"parts-{at}"
        file.write_text(one)
        assert ckptconv_here("convert", step, "--optimizer", out, *words).code == 0
        if "part" in OPTIONS:
            assert ckptconv_here("convert", step, "--optimizer", parts, "--part", "0/2", *words).code == 0
        verified_here(step, "--states", out, *words)
        file.write_text(other)
        if VERIFY:
            ckptconv_here("verify", step, "--states", out, *words).refused(1)
        if "part" in OPTIONS:
            assert ckptconv_here("convert", step, "--optimizer", parts, "--part", "1/2", *words).code == 0
            ckptconv_here("finish", parts).refused(2, "The input changed in between")


def test_an_assumption_is_told_unless_shapes_or_the_save_prove_the_names(tmp_path: Path) -> None:
    assumed = "correct if each group lists its parameters in the order of model.parameters()"
    for told, sizes, named in ((True, (2, 2), False), (False, (2, 3), False), (False, (2, 2), True)):
        model = nn.ParameterDict({f"b{at}": nn.Parameter(torch.zeros(size)) for at, size in enumerate(sizes)})
        optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
        for each in model.values():
            each.grad = torch.ones_like(each)
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "train.pt")
        run = ckptconv_here(
            "convert", tmp_path / "train.pt", "--optimizer", tmp_path / "out.safetensors", "--overwrite"
        )
        assert run.code == 0, run.err
        assert (assumed in run.out) is told, (sizes, named)


def test_a_group_that_muon_sorted_by_size_is_told_by_its_shapes(tmp_path: Path) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(size)) for name, size in MATRICES.items()})
    matrices = sorted((each for each in model.values() if each.ndim == 2), key=lambda each: each.size(), reverse=True)
    optimizer = torch.optim.Muon(matrices)
    optimizer.param_groups[0] = {
        **dict.fromkeys(("lr", "weight_decay", "momentum"), 0.1),
        "params": matrices,
        "use_muon": True,
    }
    for at, each in enumerate(model.values()):
        optimizer.state[each]["momentum_buffer"] = torch.full_like(each, float(at))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "train.pt")
    found = states_of(tmp_path / "train.pt")
    assert {name: int(value.flatten()[0]) for name, value in found.items()} == {
        f"{name}.momentum_buffer": at for at, name in enumerate(MATRICES)
    }


def test_names_that_a_save_records_are_the_model_s_or_tell_nothing(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "qkvo"})
    names = [name for name, _ in model.named_parameters()]
    optimizer, expected = stepped(model)
    optimizer.param_groups[1]["params"] = []
    states = optimizer.state_dict()
    out, order = tmp_path / "out.safetensors", tmp_path / "order.txt"
    order.write_text("\n".join(names))
    words = ["convert", tmp_path / "train.pt", "--optimizer", out, "--overwrite"]
    for recorded in (
        names,
        [f"module.{each}" for each in names],
        [f"other.{each}" for each in names],
        [*names[:3], names[0]],
        [*names[:3], "p.weight"],
        ["1", "2", "3", "0"],
    ):
        states["param_groups"][0]["param_names"], states["param_groups"][1]["param_names"] = recorded, []
        torch.save({"model": model.state_dict(), "optimizer": states}, tmp_path / "train.pt")
        run = ckptconv_here(*words)
        if recorded in (names, [f"module.{each}" for each in names]):
            assert run.code == 0, run.err
        else:
            run.refused(5, "the names in its groups do not match the model's names", "--order")
            assert ckptconv_here(*words, "--order", order).code == 0
        assert_same(load_file(out), expected)


def test_an_order_leaves_out_the_optimizer_of_another_model(tmp_path: Path) -> None:
    """The recipe of the message, followed for one of two models that are trained together."""
    made = {name: nn.ModuleDict({each: nn.Linear(4, 4) for each in "qkvo"}) for name in ("first", "second")}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in made.items()}
    tree: dict[str, Any] = {}
    for at, (name, model) in enumerate(made.items()):
        for each in model.parameters():
            each.grad = torch.full_like(each, at + 1.0)
        optimizers[name].step()
        tree |= {name: model.state_dict(), f"{name}_optimizer": optimizers[name].state_dict()}
    torch.save(tree, tmp_path / "train.pt")
    for name, model in made.items():
        groups = [
            [n for p in g["params"] for n, q in model.named_parameters() if q is p]
            for each in optimizers.values()
            for g in each.param_groups
        ]
        (tmp_path / "order.json").write_text(json.dumps(groups))
        held = optimizers[name].state
        expected = {f"{n}.{key}": own for n, each in model.named_parameters() for key, own in held[each].items()}
        words = ["convert", tmp_path / "train.pt", "--optimizer", tmp_path / f"{name}.safetensors"]
        ckptconv_here(*words).refused(2, "but its model could not be identified", "--key")
        ckptconv_here(*words, "--key", name).refused(5, "the set of optimizers", "--order")
        run = ckptconv_here(*words, "--key", name, "--order", tmp_path / "order.json")
        assert run.code == 0, run.err
        assert "The states of 8 parameters without a name there" in run.out
        assert_same(load_file(tmp_path / f"{name}.safetensors"), expected)


def test_lbfgs_has_no_state_of_a_parameter(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = model(torch.ones(1, 2)).square().sum()
        found.backward()
        return found

    optimizer.step(loss)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "train.pt")
    words = ["convert", tmp_path / "train.pt"]
    ckptconv_here(*words, "--optimizer", tmp_path / "states").refused(5, "a single state for all parameters")
    assert ckptconv_here(*words, tmp_path / "model.safetensors").code == 0
