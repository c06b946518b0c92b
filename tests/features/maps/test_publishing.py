"""A model with the names of another program is not published, or given a configuration of transformers, in silence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import every
from safetensors.torch import save_file

from ckptconv import Report, UsageError, convert
from ckptconv.features.maps.publishing import foreign_names

MEGATRON = (
    "embedding.word_embeddings.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.1.mlp.linear_fc1.weight",
    "decoder.final_layernorm.weight",
    "own.weight",
)
LLAMA = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight")
TITAN = ("tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight", "norm.weight")
OF_TRANSFORMERS = {"model_type": "llama"}


def published(place: Path, names: Sequence[str], config: dict[str, Any] | None, **options: Any) -> Report:
    (place / "in").mkdir()
    save_file({name: torch.ones(1) for name in names}, place / "in" / "model.safetensors")
    if config is not None:
        (place / "in" / "config.json").write_text(json.dumps(config))
    return convert(place / "in", place / "out", fsync=False, **options)


@every(
    "names, expected",
    [
        (MEGATRON, "megatron"),
        ([name.replace("layers.0.", "layers.").replace("layers.1.", "layers.") for name in MEGATRON], "megatron"),
        (TITAN, "meta titan"),
        (LLAMA, ""),
        # Both programs have such names, or none is known.
        ((*LLAMA, *MEGATRON[:2]), ""),
        (("own.weight", "other.bias"), ""),
        (("model.layers.0.block_sparse_moe.experts.0.w1.weight",), ""),
        ((), ""),
    ],
)
def test_the_names_tell_the_program(names: Sequence[str], expected: str) -> None:
    foreign = foreign_names(names)
    assert " ".join(dict.fromkeys(foreign.maps.values()) if foreign else ()) == expected


def test_names_of_megatron_are_not_published_in_silence(tmp_path: Path) -> None:
    (warning,) = (text for text in published(tmp_path, MEGATRON, None, for_hub=True).warnings if "names of" in text)
    assert "'decoder.final_layernorm.weight', which transformers does not load. Give the map of its arch" in warning
    assert "megatron-llama" in warning


def test_a_configuration_of_transformers_beside_them_is_refused_or_warned_of(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"names of megatron.* which would not find its weights.*--no-copy-config"):
        published(tmp_path, MEGATRON, OF_TRANSFORMERS, for_hub=True)
    assert not (tmp_path / "out").exists()
    copied = convert(tmp_path / "in", tmp_path / "out", copy_config=True)
    assert any("names of megatron" in warning for warning in copied.warnings)
    bare = convert(tmp_path / "in", tmp_path / "out", for_hub=True, copy_config=False)
    assert any("names of megatron" in warning for warning in bare.warnings)


@every(
    "names, config",
    [(LLAMA, OF_TRANSFORMERS), (LLAMA, None), (TITAN, {**OF_TRANSFORMERS, "auto_map": {"AutoModel": "own.Model"}})],
)
def test_other_models_are_published_without_a_word(names: Sequence[str], config: Any, tmp_path: Path) -> None:
    assert not [text for text in published(tmp_path, names, config, for_hub=True).warnings if "names of" in text]
