"""What says how weights are quantized stays with them, if only rows of the vocabulary are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from cells import VERIFIED
from effort import every
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.options.table import OPTIONS

WEIGHT = "model.layers.0.mlp.up_proj.weight"
CODES: dict[str, Any] = {"quant_algo": "FP8", "kv_cache_quant_algo": None}
WORDS: dict[str, Any] = {"quant_method": "modelopt", **CODES}
CUT: dict[str, dict[str, Any]] = {"vocab": {"vocab": 4}}
if "layers" in OPTIONS:
    CUT["layers"] = {"vocab": 4, "layers": 0}


def quantized(place: Path) -> Path:
    """Save a model with a weight of FP8, as Model Optimizer does."""
    place.mkdir()
    tensors = {
        "model.embed_tokens.weight": torch.ones(8, 4),
        "lm_head.weight": torch.ones(8, 4),
        WEIGHT: torch.ones(6, 4).to(torch.float8_e4m3fn),
        f"{WEIGHT}_scale": torch.tensor(0.5),
    }
    save_file(tensors, place / "model.safetensors")
    config = {"num_hidden_layers": 1, "vocab_size": 8, "quantization_config": WORDS}
    (place / "config.json").write_text(json.dumps(config))
    (place / "hf_quant_config.json").write_text(json.dumps({"quantization": CODES}))
    return place


@every("case", CUT)
def test_the_words_for_codes_are_kept(case: str, tmp_path: Path) -> None:
    source = quantized(tmp_path / "source")
    report = ckptconv.convert(source, tmp_path / "part", **VERIFIED, **CUT[case])
    assert not report.warnings
    told = json.loads((tmp_path / "part" / "config.json").read_text())
    assert told == {"num_hidden_layers": 1, "vocab_size": 4, "quantization_config": WORDS}
    # Names of layers may be others.
    assert (tmp_path / "part" / "hf_quant_config.json").exists() == (case == "vocab")
    ckptconv.convert(tmp_path / "part", tmp_path / "plain", dequantize=True)
    made = load_file(tmp_path / "plain" / "model.safetensors")
    assert torch.equal(made[WEIGHT], torch.full((6, 4), 0.5).bfloat16())
    assert made["lm_head.weight"].shape == (4, 4)


def test_they_go_where_weights_are_quantized_anew(tmp_path: Path) -> None:
    source = quantized(tmp_path / "source")
    ckptconv.convert(source, tmp_path / "plain", dequantize=True, vocab=4)
    told = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert told == {"num_hidden_layers": 1, "vocab_size": 4, "dtype": "bfloat16"}
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()
