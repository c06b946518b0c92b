"""The factors of an adapter are not published among the tensors of a model."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from cells import verify, verifying
from effort import every
from safetensors.torch import load_file, save_file

from ckptconv import UsageError, convert, merge

PREFIX = "base_model.model."
FACTORS = {
    f"{PREFIX}q.lora_A.default.weight": torch.ones(2, 3),
    f"{PREFIX}q.lora_B.default.weight": torch.ones(4, 2),
}
TRAINED = {**FACTORS, f"{PREFIX}q.base_layer.weight": torch.ones(4, 3), f"{PREFIX}norm.weight": torch.ones(3)}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}


def checkpoint(tensors: dict[str, torch.Tensor]) -> str:
    """A training checkpoint of these tensors."""
    torch.save(tensors, "trained.pt")
    return "trained.pt"


def test_a_model_with_factors_inside_is_refused_and_merging_is_explained(place: Path) -> None:
    source = checkpoint(TRAINED)
    with pytest.raises(UsageError, match=r"2 LoRA factors.* and 2 other tensors.* ckptconv merge BASE INPUT OUTPUT"):
        convert(source, "out", for_hub=True)
    assert not Path("out").exists()
    Path("config.json").write_text("{}")
    assert any("LoRA factors" in text for text in convert(source, "out", copy_config=True).warnings)
    # By the advice of the message:
    save_file({"q.weight": torch.ones(4, 3), "norm.weight": torch.ones(3)}, "base.safetensors")
    Path("adapter_config.json").write_text(json.dumps(CONFIG))
    merge("base.safetensors", source, "merged", for_hub=True)
    assert torch.equal(load_file("merged/model.safetensors")["q.weight"], torch.full((4, 3), 1.0 + 2 * 2))


@verifying
def test_an_adapter_alone_is_not_called_a_model_in_silence(place: Path) -> None:
    source = checkpoint(FACTORS)
    (warning,) = convert(source, "out").warnings
    assert "2 LoRA factors" in warning
    assert "from the names of tensors with --rename" in warning
    of_peft = checkpoint({name.replace(".default", ""): factor for name, factor in FACTORS.items()})
    (warning,) = convert(of_peft, "again").warnings
    assert "2 LoRA factors, but has the file name of a model" in warning
    with pytest.raises(UsageError, match="2 LoRA factors, but has the file name of a model") as refused:
        convert(of_peft, "published", for_hub=True)
    # The advice works.
    assert "name OUTPUT adapter_model.safetensors, and copy adapter_config.json next to it" in refused.value.hint
    Path("adapter_config.json").write_text(json.dumps(CONFIG))
    Path("advised").mkdir()
    assert not convert(of_peft, "advised/adapter_model.safetensors").warnings
    Path("advised/adapter_config.json").write_text(json.dumps(CONFIG))
    save_file({"q.weight": torch.zeros(4, 3)}, "base.safetensors")
    merge("base.safetensors", "advised", "merged.safetensors")
    assert torch.equal(load_file("merged.safetensors")["q.weight"], torch.full((4, 3), 4.0))
    # So does a directory that is PEFT's.
    assert not convert(of_peft, "published", for_hub=True).warnings
    assert {path.name for path in Path("published").iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    assert verify(of_peft, "published", for_hub=True).tensors == 2
    Path(of_peft).rename("adapter_model.bin")
    for name, options in (("adapter_model.safetensors", {}), ("adapter", {"for_hub": True})):
        assert not convert("adapter_model.bin", name, **options).warnings  # type: ignore[arg-type]


def test_an_adapter_alone_gets_the_advice_that_makes_it_one_of_peft(place: Path) -> None:
    source = checkpoint(TRAINED)
    with pytest.raises(
        UsageError, match=r"and nothing else.* adapter_model\.safetensors.* --rename '\\\.default\("
    ) as error:
        convert(source, "out", for_hub=True, include=["*lora_*"])
    rule = error.value.hint.partition("--rename '")[2].partition("'")[0]
    with pytest.raises(
        UsageError, match=r"2 LoRA factors, but has the file name of a model.* adapter_model\.safetensors"
    ):
        convert(source, "out", for_hub=True, include=["*lora_*"], rename=[rule])
    with pytest.raises(UsageError, match=re.escape(f"and use --include '*lora_*' --rename '{rule}'")):
        convert(source, "out", for_hub=True)
    Path("adapter").mkdir()
    convert(source, "adapter/adapter_model.safetensors", include=["*lora_*"], rename=[rule])
    Path("adapter/adapter_config.json").write_text(json.dumps(CONFIG))
    save_file({"q.weight": torch.zeros(4, 3)}, "base.safetensors")
    merge("base.safetensors", "adapter", "merged.safetensors")
    assert torch.equal(load_file("merged.safetensors")["q.weight"], torch.full((4, 3), 4.0))


BESIDE = {
    f"{PREFIX}head.modules_to_save.default.weight": torch.full((2, 4), 5.0),
    f"{PREFIX}head.original_module.weight": torch.zeros(2, 4),
    f"{PREFIX}embed.token_adapter.trainable_tokens_delta.default": torch.full((1, 3), 6.0),
    f"{PREFIX}embed.token_adapter.trainable_tokens_original.default": torch.zeros(1, 3),
    f"{PREFIX}embed.token_adapter.base_layer.weight": torch.zeros(3, 3),
}
# As save_pretrained names them.
SAVED = {
    **{name.replace(".default", ""): factor for name, factor in FACTORS.items()},
    f"{PREFIX}head.weight": torch.full((2, 4), 5.0),
    f"{PREFIX}embed.token_adapter.trainable_tokens_delta": torch.full((1, 3), 6.0),
}


@pytest.mark.parametrize("include", [[], ["*lora_*"]])
def test_the_advice_keeps_all_that_an_adapter_trained(include: list[str], place: Path) -> None:
    source = checkpoint({**TRAINED, **BESIDE})
    (*lacking, warning) = convert(source, "out", include=include).warnings
    assert len(lacking) == len(include)
    words = shlex.split(re.search(r"--include.*='", warning)[0])  # type: ignore[index]
    chosen = [word for option, word in itertools.pairwise(words) if option == "--include"]
    (rule,) = (word for option, word in itertools.pairwise(words) if option == "--rename")
    Path("adapter").mkdir()
    assert not convert(source, "adapter/adapter_model.safetensors", include=chosen, rename=[rule]).warnings
    adapter = load_file("adapter/adapter_model.safetensors")
    assert adapter.keys() == SAVED.keys()
    assert all(torch.equal(adapter[name], tensor) for name, tensor in SAVED.items())


def test_an_adapter_without_its_other_trained_tensors_is_warned_of(place: Path) -> None:
    source = checkpoint({**TRAINED, **BESIDE})
    rule = r"\.default(?=\.|$)="
    (warning,) = convert(source, "adapter_model.safetensors", include=["*lora_*"], rename=[rule]).warnings
    assert "The output has the factors of the adapter 'default', but lacks 2 other tensors" in warning
    # Those of another adapter are not missed.
    others = {name.replace(".default", ".reference"): tensor for name, tensor in BESIDE.items()}
    source = checkpoint({**TRAINED, **others})
    assert not convert(source, "adapter_model.safetensors", include=["*lora_*"], rename=[rule]).warnings


@every(
    "tensors",
    [
        {"q.weight": torch.ones(2)},
        # As PEFT saves them, and loads them.
        {f"{PREFIX}q.lora_A.weight": torch.ones(2, 3), f"{PREFIX}head.weight": torch.ones(2)},
    ],
)
def test_nothing_is_said_of_other_tensors(tensors: dict[str, torch.Tensor], place: Path) -> None:
    convert(checkpoint(tensors), "out", for_hub=True)


def test_an_adapter_without_a_configuration_is_told_which_keys_it_needs(place: Path) -> None:
    save_file({"q.weight": torch.ones(4, 3)}, "base.safetensors")
    with pytest.raises(UsageError, match='"peft_type": "LORA", r, lora_alpha and target_modules'):
        merge("base.safetensors", checkpoint(TRAINED), "out")


def test_a_whole_model_in_the_place_of_an_adapter_is_told_how_models_are_combined(place: Path) -> None:
    save_file({"q.weight": torch.ones(4, 3)}, "base.safetensors")
    with pytest.raises(UsageError, match=r"nor LoRA factors.* use ckptconv average"):
        merge("base.safetensors", "base.safetensors", "out")


def test_a_tokenizer_that_a_training_changed_is_named_where_that_of_the_base_is_copied(place: Path) -> None:
    for folder in ("base", "adapter"):
        Path(folder).mkdir()
        Path(folder, "tokenizer.json").write_text('{"version": "1.0"}')
    save_file({"q.weight": torch.ones(4, 3)}, "base/model.safetensors")
    Path("base/config.json").write_text('{"model_type": "llama"}')
    factors = {name.replace(".default", ""): factor for name, factor in FACTORS.items()}
    save_file(factors, "adapter/adapter_model.safetensors")
    Path("adapter/adapter_config.json").write_text(json.dumps(CONFIG))
    Path("adapter/README.md").write_text("Of the adapter.")
    assert not merge("base", "adapter", "same", for_hub=True).warnings
    Path("adapter/tokenizer.json").write_text('{"version": "2.0"}')
    Path("adapter/chat_template.jinja").write_text("{{ messages }}")
    for options in ({"for_hub": True}, {"copy_config": True}, {}):
        (warning,) = merge("base", "adapter", f"other-{len(options)}", overwrite=True, **options).warnings
        assert warning.startswith(
            "adapter has its own chat_template.jinja (the base has none), tokenizer.json, but the output has the "
        )
    assert Path("other-1/tokenizer.json").read_text() == '{"version": "1.0"}'
    assert not merge("base", "adapter", "bare", copy_config=False).warnings
