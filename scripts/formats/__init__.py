"""Checks of formats beside the programs that write them: a module for each, with `check`, which `test_formats.py`
calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

# Tensors by name: the shape of each, and its bytes.
Tensors: TypeAlias = "Mapping[str, tuple[list[int], bytes]]"


def read(path: Path) -> Tensors:
    """Return the tensors of a file of safetensors."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    spans = {name: (each["shape"], each["data_offsets"]) for name, each in header.items()}
    return {name: (shape, data[start + begin : start + end]) for name, (shape, (begin, end)) in spans.items()}


def differing(made: Tensors, wanted: Tensors) -> str:
    """Return which tensors differ; "" if none does."""
    if made.keys() != wanted.keys():
        return f"{sorted(made.keys() ^ wanted.keys())[:4]} are in one of the two"
    names = [name for name, tensor in wanted.items() if tensor != made[name]]
    return f"{', '.join(names[:4])} differ, {len(names)} of {len(wanted)}" if names else ""


def configured(place: Path, words: Mapping[str, Any], **more: Any) -> None:
    """Write the configuration of a model of which `words` say how it is quantized."""
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": words, **more}
    (place / "config.json").write_text(json.dumps(config))


def verified() -> dict[str, Any]:
    """Return the option of conversions that has their output verified, where a feature does so."""
    from ckptconv.process import has_feature

    return {"verify": True} if has_feature("verify") else {}


def dequantized(place: Path, wanted: Tensors) -> str:
    """Return how the weights, in bfloat16, that we make of a quantized checkpoint differ from those that are wanted."""
    import ckptconv

    options: dict[str, Any] = {"dequantize": True, "overwrite": True, **verified()}
    ckptconv.convert(place, place / "plain", **options)
    return differing(read(place / "plain" / "model.safetensors"), wanted)
