"""Numbers of layers, experts and tokens in a configuration that are not those of the weights are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from effort import every
from safetensors.torch import save_file

import ckptconv

LAYERS = {f"model.layers.{layer}.mlp.experts.{expert}.w": torch.ones(1) for layer in range(3) for expert in range(4)}


@every(
    "config, expected",
    [
        ({"num_hidden_layers": 3, "num_experts": 4}, ""),
        ({"text_config": {"num_hidden_layers": 3}, "vision_config": {"num_hidden_layers": 9}}, ""),
        ({"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, ""),
        (
            {"num_hidden_layers": 32},
            "num_hidden_layers 32, but the weights of the output have 3 layers.",
        ),
        ({"text_config": {"n_layer": 5}}, "text_config.n_layer 5"),
        (
            {"n_routed_experts": 64},
            "but the number of experts in a layer of the output is 4.",
        ),
    ],
)
def test_numbers_that_are_not_those_of_the_weights_are_told(
    config: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    save_file(LAYERS, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    told = ckptconv.convert(tmp_path / "in", tmp_path / "out", copy_config=True).warnings
    assert len(told) == bool(expected), told
    assert expected in "".join(told)


WORDS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TEXT, VISION = {"text_config": {"vocab_size": 8}}, {"vision_config": {"vocab_size": 5}}


@every(
    "rows, config, expected",
    [
        ({WORDS: 8}, {"vocab_size": 8}, ""),
        ({WORDS: 8}, {}, ""),
        ({WORDS: 8}, {"vocab_size": 6}, "has vocab_size 6, but 'model.embed_tokens.weight' of the output has 8 rows"),
        ({WORDS: 6, HEAD: 6}, {"vocab_size": 8}, "has vocab_size 8"),
        ({f"language_{WORDS}": 8}, {**TEXT, **VISION}, ""),
        ({f"language_{WORDS}": 9}, TEXT, "has text_config.vocab_size 8"),
        # Some models of several components state an older number outside.
        ({WORDS: 8}, {"vocab_size": 6, **TEXT}, ""),
        # Models with rows that are no tokens: padding, and those of other components.
        ({WORDS: 8}, {"vocab_size": 6, "pad_vocab_size_multiple": 4}, ""),
        ({WORDS: 8}, {"vocab_size": 6, "padded_vocab_size": 8}, ""),
        ({WORDS: 8}, {"vocab_size": 6, "additional_vocab_size": 2}, ""),
        ({WORDS: 9, HEAD: 8}, {"vocab_size": 8}, ""),
        # Heads may have rows of anything, such as classes.
        ({HEAD: 4, "model.position.weight": 9}, {"vocab_size": 8}, ""),
    ],
)
def test_a_vocabulary_that_is_not_that_of_the_embeddings_is_told(
    rows: dict[str, int], config: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    save_file({name: torch.ones(count, 2) for name, count in rows.items()}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    warnings = ckptconv.convert(tmp_path / "in", tmp_path / "out", for_hub=True, fsync=False).warnings
    assert len(warnings) == bool(expected), warnings
    assert expected in "".join(warnings)
