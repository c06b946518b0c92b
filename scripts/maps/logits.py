"""Whether transformers computes with the results of a map what the framework computed with the original."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ckptconv

# How much of the largest logit two ways of computing in float32 may differ.
_TOLERANCE = 1e-5
IDS = torch.arange(2, 12)[None]


def compare(
    name: str,
    model: Any,
    logits: Callable[[Any], torch.Tensor],
    save: Callable[[Any, Path], object],
    config: dict[str, Any],
    map_: str,
) -> str:
    """Fill a model with random numbers, save and convert it, and load that with transformers. Return what was found.

    Raise ValueError if the logits are not the same.
    """
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        expected = logits(model.eval())
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "source")
        source.mkdir()
        save(model, source)
        return compare_saved(name, source, expected, config, map_)


def compare_saved(
    name: str, source: Path, expected: torch.Tensor, config: dict[str, Any], map_: str, lacking: str = ""
) -> str:
    """Convert a saved model whose logits are `expected`, and load that with transformers. Return what was found.
    `lacking` is a pattern of the weights that were not saved.

    Raise ValueError if the logits are not the same.
    """
    with tempfile.TemporaryDirectory() as place:
        target = Path(place, "hf")
        (source / "config.json").write_text(json.dumps(config))
        ckptconv.convert(source, target, map=map_, progress=None)
        (target / "config.json").write_text(json.dumps(config))
        # The fast way to compute experts asks for larger ones, and that to attend leaves out caps of logits.
        settings = {"dtype": torch.float32, "experts_implementation": "eager", "attn_implementation": "eager"}
        loaded, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True, **settings)
        missing = [key for key in report["missing_keys"] if not re.match(lacking or "$", key)]
        if missing or any(report[each] for each in ("unexpected_keys", "mismatched_keys")):
            raise ValueError(f"{name}: transformers found {report}")
        with torch.no_grad():
            found = loaded.eval()(IDS).logits
    difference = (found - expected[..., : found.shape[-1]]).abs().max() / found.abs().max()
    if not difference < _TOLERANCE:
        raise ValueError(f"{name}: the logits differ by {difference:.2g} of the largest")
    return f"{name}: the logits of transformers are those of the original, but for {difference:.1g} of the largest"
