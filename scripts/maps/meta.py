"""Llama as Meta released it, as the script of transformers 4 converts it.

It runs under transformers 4.45, the last that has the script, and only there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers.models.llama import convert_llama_weights_to_hf as script

from maps.cases import Case, Tensors, numbered

PACKAGES = ("torch", "transformers")
_DIM, _HEADS, _KV_HEADS, _LAYERS, _FFN, _VOCAB = 24, 6, 2, 2, 16, 38
# Along which dimension a rank of the tensor-parallel group has a part. Norms are whole in each.
_PARTS = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}


def cases() -> Iterator[Case]:
    for name, version, ranks in (("meta-llama", "3", 1), ("meta-llama3-tp2", "3", 2), ("meta-llama2-tp2", "2", 2)):
        yield _case(name, version, ranks)


def _case(name: str, version: str, ranks: int) -> Case:
    whole = numbered({each: torch.empty(shape) for each, shape in _shapes().items()})
    parts = [
        {each: _part(each, tensor, rank, ranks, version) for each, tensor in whole.items()} for rank in range(ranks)
    ]
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place, "llama"), Path(place, "hf")
        source.mkdir()
        for rank, part in enumerate(parts):
            torch.save(part, source / f"consolidated.{rank:02d}.pth")
        params = {
            "dim": _DIM, "n_layers": _LAYERS, "n_heads": _HEADS, "n_kv_heads": _KV_HEADS, "multiple_of": 16,
            "ffn_dim_multiplier": 0.25, "norm_eps": 1e-5, "vocab_size": _VOCAB, "rope_theta": 500000.0,
        }  # fmt: skip
        (source / "params.json").write_text(json.dumps(params))
        # The script converts to bfloat16, which does not hold every number: it is told to keep float32.
        script.torch.bfloat16, kept = torch.float32, torch.bfloat16
        script.torch.float16, half = torch.float32, torch.float16
        try:
            script.write_model(
                str(target), str(source), model_size=None, llama_version=version, num_shards=ranks, vocab_size=_VOCAB
            )
        finally:
            script.torch.bfloat16, script.torch.float16 = kept, half
        (file,) = target.glob("*.safetensors")
        hf = load_file(file)
        config = json.loads((target / "config.json").read_text())
    ours = parts[0] if ranks == 1 else _with_ranks(parts)
    made = f"write_model of transformers' convert_llama_weights_to_hf.py, as Llama {version} in {ranks} files"
    return Case(name, name.removesuffix("-tp2"), ours, hf, config, made, PACKAGES, {"r": ranks} if ranks > 1 else {})


def _shapes() -> dict[str, tuple[int, ...]]:
    head = _DIM // _HEADS
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (_VOCAB, _DIM)}
    for layer in range(_LAYERS):
        inner: dict[str, tuple[int, ...]] = {
            "attention.wq": (_DIM, _DIM), "attention.wk": (_KV_HEADS * head, _DIM),
            "attention.wv": (_KV_HEADS * head, _DIM), "attention.wo": (_DIM, _DIM), "feed_forward.w1": (_FFN, _DIM),
            "feed_forward.w2": (_DIM, _FFN), "feed_forward.w3": (_FFN, _DIM), "attention_norm": (_DIM,),
            "ffn_norm": (_DIM,),
        }  # fmt: skip
        found |= {f"layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
    return {**found, "norm.weight": (_DIM,), "output.weight": (_VOCAB, _DIM)}


def _part(name: str, tensor: torch.Tensor, rank: int, ranks: int, version: str) -> torch.Tensor:
    """Return what a rank's file has of a tensor."""
    word = name.split(".")[-2]
    dim = (0 if version == "3" else 1) if word == "tok_embeddings" else _PARTS.get(word)
    return tensor.clone() if dim is None else tensor.chunk(ranks, dim)[rank].clone()


def _with_ranks(parts: list[Tensors]) -> Tensors:
    """Return tensors of several ranks as ckptconv names them: those that are whole in each rank once."""
    made: Tensors = {}
    for rank, part in enumerate(parts):
        for name, tensor in part.items():
            made[name if tensor.dim() == 1 else f"{rank}.{name}"] = tensor
    return made
