"""What a configuration states, and is not so in the output, is told; what is true of it is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import every
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.outputs.kinds import NAMED

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PLAIN = {EMBEDDINGS: torch.ones(4, 2), HEAD: torch.zeros(4, 2)}
CAUSAL = {"architectures": ["LlamaForCausalLM"]}


def test_weights_under_the_prefix_of_a_wrapper_are_not_published(place: Path) -> None:
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in PLAIN.items()}}, "train.pt")
    with pytest.raises(ckptconv.UsageError, match=r"begin with 'module\.', .*--strip-prefix module\."):
        ckptconv.convert("train.pt", "out", for_hub=True)
    ckptconv.convert("train.pt", "out", for_hub=True, strip_prefix="module.")
    assert load_file("out/model.safetensors").keys() == PLAIN.keys()
    for wrapped, prefix in (("module.", "module."), ("_forward_module.model.", "_forward_module.model.model.")):
        torch.save({f"{wrapped}{EMBEDDINGS}": PLAIN[EMBEDDINGS]}, "tied.pt")
        with pytest.raises(ckptconv.UsageError, match=f"--strip-prefix {prefix}, or"):
            ckptconv.convert("tied.pt", "tied", for_hub=True)
    # The whole prefix of the input is named, whatever was removed of it; a prefix that --rename made is not removable.
    torch.save({f"_forward_module._orig_mod.{name}": tensor for name, tensor in PLAIN.items()}, "twice.pt")
    for options in ({}, {"strip_prefix": "_forward_module."}, {"rename": [r"^_forward_module\.="]}):
        with pytest.raises(ckptconv.UsageError, match=r"--strip-prefix _forward_module\._orig_mod\., or"):
            ckptconv.convert("twice.pt", "twice", for_hub=True, **options)  # type: ignore[arg-type]
    ckptconv.convert("twice.pt", "twice", for_hub=True, strip_prefix="_forward_module._orig_mod.")
    torch.save(PLAIN, "plain.pt")
    with pytest.raises(ckptconv.UsageError, match="Give names without it with --rename, or"):
        ckptconv.convert("plain.pt", "renamed", for_hub=True, rename=["^=module."])
    # The body of a model alone has one module, and code next to a model may give it any names.
    torch.save({EMBEDDINGS: PLAIN[EMBEDDINGS]}, "body.pt")
    assert ckptconv.convert("body.pt", "body", for_hub=True).tensors == 1
    Path("config.json").write_text(json.dumps({"auto_map": {"AutoModel": "own.Model"}}))
    assert ckptconv.convert("train.pt", "own", for_hub=True).tensors == 2


def test_an_optimizer_alone_is_not_called_a_model_in_silence(place: Path) -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), "optimizer.pt")
    (told,) = ckptconv.convert("optimizer.pt", "out").warnings
    assert "optimizer states by number, such as 'state.0.step', but no weights" in told
    torch.save({"model": {"w": weight}, "optimizer": optimizer.state_dict()}, "train.pt")
    assert not ckptconv.convert("train.pt", "whole").warnings


def warnings(here: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], **options: Any) -> list[str]:
    (here / "in").mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, here / "in" / "model.safetensors")
    (here / "in" / "config.json").write_text(json.dumps(config))
    return ckptconv.convert(here / "in", here / "out", copy_config=True, **options).warnings


@every(
    "tensors, config, expected",
    [
        (PLAIN, {"torch_dtype": "float32"}, ""),
        (
            PLAIN,
            {"torch_dtype": "bfloat16"},
            "has dtype bfloat16, but the weights of the output are float32. With --dtype float32, the copy",
        ),
        ({**PLAIN, "norm": torch.ones(1).bfloat16()}, {"dtype": "bfloat16"}, ""),
        (PLAIN, {"dtype": "auto"}, ""),
        (PLAIN, {"tie_word_embeddings": False, **CAUSAL}, ""),
        ({EMBEDDINGS: PLAIN[EMBEDDINGS]}, {"tie_word_embeddings": True, **CAUSAL}, ""),
        ({EMBEDDINGS: PLAIN[EMBEDDINGS]}, {"tie_word_embeddings": False, **CAUSAL}, "has no lm_head.weight"),
        # The body of a model alone never has one.
        ({EMBEDDINGS: PLAIN[EMBEDDINGS]}, {"tie_word_embeddings": False, "architectures": ["LlamaModel"]}, ""),
        (
            PLAIN,
            {"tie_word_embeddings": True, **CAUSAL},
            "tie_word_embeddings true, but the output also has lm_head.weight",
        ),
    ],
)
def test_a_statement_that_is_not_true_is_told(
    tensors: Mapping[str, torch.Tensor], config: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    told = warnings(tmp_path, tensors, config)
    assert len(told) == bool(expected), told
    assert expected in "".join(told)


def test_what_the_conversion_itself_changes_is_true(tmp_path: Path) -> None:
    assert warnings(tmp_path, PLAIN, {"torch_dtype": "float32"}, dtype="bf16") == []


def test_one_tensor_under_two_names_is_tied(tmp_path: Path) -> None:
    embeddings = torch.ones(4, 2)
    (tmp_path / "in").mkdir()
    torch.save({EMBEDDINGS: embeddings, HEAD: embeddings}, tmp_path / "in" / "pytorch_model.bin")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"tie_word_embeddings": True, **CAUSAL}))
    for tied in ("alias", "duplicate"):
        assert ckptconv.convert(tmp_path / "in", tmp_path / tied, copy_config=True, tied=tied).warnings == []
    (tmp_path / "in" / "config.json").write_text(json.dumps({"tie_word_embeddings": False, **CAUSAL}))
    told = ckptconv.convert(tmp_path / "in", tmp_path / "untied", copy_config=True).warnings
    assert any("has no lm_head.weight" in text for text in told)


def test_a_head_that_only_the_configuration_ties_is_not_duplicated(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({EMBEDDINGS: torch.ones(4, 2)}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"tie_word_embeddings": True, **CAUSAL}))
    for output in ("out", "out.safetensors"):
        assert ckptconv.convert(tmp_path / "in", tmp_path / output, tied="duplicate").warnings == [
            "--tied has no effect: no two names of the input are recorded as those of one tensor."
        ]
    if "pt" in NAMED:
        (told,) = ckptconv.convert(tmp_path / "in", tmp_path / "out.pt", tied="duplicate").warnings
        assert told.startswith("--tied has no effect on a .pt file, where all names of a tied tensor share its memory")
