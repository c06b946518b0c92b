"""What is written loads in the libraries people use, and gives the same model."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import of_features
from checkpoints import ckptconv_here
from safetensors.torch import load_file, load_model

import ckptconv as library
from ckptconv.options.table import OPTIONS

os.environ["HF_HUB_OFFLINE"] = "1"

pytestmark = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")), reason="needs transformers and accelerate"
)

INDEX = "model.safetensors.index.json"


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=97, n_positions=32))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=48,
        vocab_size=101, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


# What saves parameters by name, and what is tied, as a step of a training.
TRAININGS = {way: save for trainings in of_features("TRAININGS") for way, save in trainings.items()}
MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "tied_llama": llama}


@pytest.fixture(params=MODELS, scope="module")
def trained(request: pytest.FixtureRequest) -> Any:
    """A tiny model after two steps."""
    torch.manual_seed(0)
    model = MODELS[request.param]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        tokens = torch.randint(0, 90, (2, 12))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def answers(model: Any) -> torch.Tensor:
    tokens = torch.arange(2 * 9).reshape(2, 9)
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=tokens).logits
    return result


def ties(model: Any) -> dict[str, str]:
    """Names of the state dict that are parameters of another name: {tied: its parameter}."""
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: owners[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if owners[id(parameter)] != name
    }


def saved(model: Any, directory: Path, way: str) -> Path:
    """A step of a training of the model, as a way of TRAININGS saves it."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    TRAININGS[way](directory, named, ties(model))
    return directory


def with_config(model: Any, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    model.config.save_pretrained(directory)
    return directory


# ------------------------------------------------------------------------------------------------------ transformers


@pytest.mark.skipif("copy_config" not in OPTIONS, reason="no configuration is copied")
@pytest.mark.parametrize("name", MODELS)
def test_a_directory_that_was_converted_with_its_configuration_is_loaded_as_it_is(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = MODELS[name]().eval()
    source = tmp_path / "source"
    model.config.save_pretrained(source)
    model.generation_config.save_pretrained(source)
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    library.convert(source, tmp_path / "out", copy_config=True, max_shard_size=20_000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    words = torch.arange(12)[None]
    assert torch.equal(loaded(words).logits, model(words).logits)


@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
@pytest.mark.parametrize("name", MODELS)
def test_a_training_that_is_converted_like_its_base_model_is_loaded_as_that(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base, tuned = MODELS[name]().bfloat16(), MODELS[name]()
    base.save_pretrained(tmp_path / "base", max_shard_size="20kB")
    torch.save({f"module.{key}": tensor for key, tensor in tuned.state_dict().items()}, tmp_path / "step.pt")
    library.convert(tmp_path / "step.pt", tmp_path / "out", strip_prefix="module.", like=tmp_path / "base")
    tuned.bfloat16().save_pretrained(tmp_path / "usual", max_shard_size="20kB")
    shards = list((tmp_path / "usual").glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        found, expected = load_file(tmp_path / "out" / shard.name), load_file(shard)
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
    loaded, usual = (AutoModelForCausalLM.from_pretrained(tmp_path / place).eval() for place in ("out", "usual"))
    assert torch.equal(loaded(torch.arange(12)[None]).logits, usual(torch.arange(12)[None]).logits)


@pytest.mark.parametrize("size", ["1GB", "12kB"], ids=["one file", "shards"])
@pytest.mark.parametrize("way", TRAININGS)
def test_a_step_of_a_training_becomes_a_directory_for_from_pretrained(
    trained: Any, way: str, size: str, tmp_path: Path
) -> None:
    output = with_config(trained, tmp_path / "model")
    step = saved(trained, tmp_path / "run", way)
    assert ckptconv_here("convert", step, output, "--max-shard-size", size).code == 0
    assert (output / INDEX).exists() == (size != "1GB")
    model, info = type(trained).from_pretrained(output, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(answers(model.eval()), answers(trained))


def test_pytorch_model_bin_becomes_model_safetensors_for_from_pretrained(trained: Any, tmp_path: Path) -> None:
    directory = with_config(trained, tmp_path / "model")
    torch.save(trained.state_dict(), directory / "pytorch_model.bin")
    assert ckptconv_here("pt2safetensors", directory / "pytorch_model.bin", directory / "model.safetensors").code == 0
    (directory / "pytorch_model.bin").unlink()
    model = type(trained).from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(answers(model.eval()), answers(trained))


# ------------------------------------------------------------------------------------ accelerate, safetensors, torch


@pytest.mark.parametrize("size", ["1GB", "12kB"], ids=["one file", "shards"])
@pytest.mark.parametrize("way", TRAININGS)
def test_accelerate_loads_it_into_a_model(
    trained: Any, way: str, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import load_checkpoint_in_model

    output = tmp_path / "model"
    step = saved(trained, tmp_path / "run", way)
    assert ckptconv_here("convert", step, output, "--max-shard-size", size).code == 0
    torch.manual_seed(1)
    model = type(trained)(trained.config).eval()
    assert not torch.equal(answers(model), answers(trained))
    # It collects garbage after each file, among all that the libraries have made.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    load_checkpoint_in_model(model, str(output))
    assert torch.equal(answers(model), answers(trained))


@pytest.mark.parametrize("way", TRAININGS)
def test_safetensors_loads_it_into_a_model(trained: Any, way: str, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    assert ckptconv_here("convert", saved(trained, tmp_path / "run", way), output).code == 0
    model = type(trained)(trained.config).eval()
    missing, unexpected = load_model(model, output)
    assert not missing
    assert not unexpected
    assert torch.equal(answers(model), answers(trained))
    assert set(load_file(output)) == {name for name, _ in trained.named_parameters()}


@pytest.mark.skipif("dequantize" not in OPTIONS, reason="there are no quantized weights")
def test_dequantized_weights_and_their_configuration_are_those_of_transformers(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3Config, Qwen3ForCausalLM

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    config = Qwen3Config(vocab_size=97, hidden_size=128, intermediate_size=256, num_hidden_layers=1, **heads)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).bfloat16()
    stored = {}
    for name, tensor in model.state_dict().items():
        stored[name] = tensor
        if name.endswith("proj.weight"):
            rows, columns = (extent // 128 for extent in tensor.shape)
            codes = torch.randint(0, 126, tensor.shape, dtype=torch.uint8)
            stored[name] = codes.view(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.rand(rows, columns) / 1000 + 1e-4
    source = with_config(model, tmp_path / "fp8")
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    told = json.loads((source / "config.json").read_text())
    words = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    (source / "config.json").write_text(json.dumps({**told, "quantization_config": words}))
    library.convert(source, tmp_path / "ours", dequantize=True, copy_config=True)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    theirs = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name])
    assert torch.equal(answers(ours), answers(theirs))
    theirs.config.save_pretrained(tmp_path / "theirs")
    written = [json.loads((tmp_path / place / "config.json").read_text()) for place in ("ours", "theirs")]
    assert written[0] == written[1]
